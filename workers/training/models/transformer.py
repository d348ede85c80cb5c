"""A decoder-only transformer: RMSNorm, rotary position embedding, grouped-query attention, SwiGLU.

Shapes in names: B batch, T sequence, D dim, H heads, K key/value heads, E dim of a head, V
vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn

from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.workers.training.loss import losses_in_chunks


class RMSNorm(nn.Module):
    """Source: Zhang, Sennrich, "Root mean square layer normalization", 2019."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x_btd: Tensor) -> Tensor:
        return F.rms_norm(x_btd, self.weight.shape, self.weight, 1e-5)


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding (Su et al., "RoFormer", 2021). Where
    the heads are divided over a tensor axis, H and K are this rank's."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = config.num_heads, config.kv_heads
        self.head_dim = config.dim // config.num_heads
        self.query = nn.Linear(config.dim, self.num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(self.num_heads * self.head_dim, config.dim, bias=False)
        self.query_norm = RMSNorm(self.head_dim) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_dim) if config.qk_norm else None

    def forward(self, x_btd: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
        batch, length, _ = x_btd.shape
        q_bthe = self.query(x_btd).view(batch, length, -1, self.head_dim)
        k_btke = self.key(x_btd).view(batch, length, -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q_bthe, k_btke = self.query_norm(q_bthe), self.key_norm(k_btke)
        q_bhte, k_bkte = q_bthe.transpose(1, 2), k_btke.transpose(1, 2)
        v_bkte = self.value(x_btd).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q_bhte, k_bkte = _rotate(q_bhte, cos_te, sin_te), _rotate(k_bkte, cos_te, sin_te)
        out_bhte = F.scaled_dot_product_attention(
            q_bhte, k_bkte, v_bkte, is_causal=True, enable_gqa=self.kv_heads != self.num_heads
        )
        out_btd: Tensor = self.output(out_bhte.transpose(1, 2).reshape(batch, length, -1))
        return out_btd


class FeedForward(nn.Module):
    """SwiGLU. Source: Shazeer, "GLU variants improve transformer", 2020."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        out_btd: Tensor = self.down(F.silu(self.gate(x_btd)) * self.up(x_btd))
        return out_btd


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim)
        self.ffn = FeedForward(config)

    def forward(self, x_btd: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
        x_btd = x_btd + self.attention(self.attention_norm(x_btd), cos_te, sin_te)
        out_btd: Tensor = x_btd + self.ffn(self.ffn_norm(x_btd))
        return out_btd


class Head(nn.Linear):
    """Activations (B, T, D) -> logits (B, T, V), or with targets (B, T) the loss of each token."""

    def forward(
        self, x_btd: Tensor, targets_bt: Tensor | None = None, chunk_tokens: int = 0,
        z_loss: float = 0.0,
    ) -> Tensor:  # fmt: skip
        if targets_bt is None:
            return super().forward(x_btd)
        return losses_in_chunks(super().forward, x_btd, targets_bt, chunk_tokens, z_loss)


class Transformer(nn.Module):
    """Tokens (B, T) -> logits (B, T, V); with the arguments of Head, losses (B, T). A rank of a
    pipeline has some of its parts only: a stage without the embedding is given (B, T, D), and one
    without the head returns it."""

    embedding: nn.Embedding | None
    norm: RMSNorm | None
    head: Head | None

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.head = Head(config.dim, config.vocab_size, bias=False)
        self.sequence_parts = 1
        """Ranks that divide the sequence between two blocks: the tensor axis."""

    def edges(self) -> list[list[nn.Module]]:
        """This rank's modules beside blocks, as FSDP groups."""
        groups: list[list[nn.Module | None]] = [[self.embedding], [self.norm, self.head]]
        groups_left = [[part for part in group if part is not None] for group in groups]
        return [group for group in groups_left if group]

    def forward(
        self, tokens_bt: Tensor, positions_t: Tensor | None = None, **of_head: Any
    ) -> Tensor:
        """`positions_t`: where the tokens are in their sequence; None: they are all of it."""
        length = tokens_bt.shape[1]
        if self.embedding is None:
            x_btd, length = tokens_bt, length * self.sequence_parts
        else:
            x_btd = self.embedding(tokens_bt)
        head_dim = self.config.dim // self.config.num_heads
        if positions_t is None:
            positions_t = torch.arange(length, device=tokens_bt.device)
        cos_te, sin_te = _angles(positions_t, head_dim, self.config.rope_theta, x_btd)
        for block in self.blocks:
            x_btd = block(x_btd, cos_te, sin_te)
        if self.norm is None or self.head is None:
            return x_btd
        out: Tensor = self.head(self.norm(x_btd), **of_head)
        return out

    def standard_deviation(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; None: ones (norms).

        0.02, and layers that write to the residual stream scaled down by the number of such
        layers. Source: Radford et al., "Language models are unsupervised multitask learners", 2019.
        """
        if "norm" in name:
            return None
        if name.endswith(("attention.output.weight", "ffn.down.weight")):
            return 0.02 / math.sqrt(2 * self.config.num_layers)
        return 0.02


def _angles(
    positions_t: Tensor, head_dim: int, theta: float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """cos and sin of all rotations, (T, E); computed in every forward, so that they are not
    state."""
    half = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32)
    angles_te = torch.outer(positions_t.float(), theta ** (-half / head_dim)).repeat(1, 2)
    return angles_te.cos().to(like.dtype), angles_te.sin().to(like.dtype)


def _rotate(x_bhte: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
    first, second = x_bhte.chunk(2, dim=-1)
    return x_bhte * cos_te + torch.cat((-second, first), dim=-1) * sin_te


def num_parameters(config: Model) -> int:
    head_dim = config.dim // config.num_heads
    attention = config.dim * head_dim * 2 * (config.num_heads + config.kv_heads)
    block = attention + 3 * config.dim * config.ffn + 2 * config.dim
    block += 2 * head_dim * config.qk_norm
    return config.num_layers * block + 2 * config.vocab_size * config.dim + config.dim


def flops_per_token(config: Model, sequence_length: int) -> float:
    """Model FLOPs of forward and backward for one token.

    6 (P - P_embedding) + 6 L heads (d_qk + d_v) T, with attention counted in full. Source:
    TorchTitan's get_nparams_and_flops, after Chowdhery et al., "PaLM", 2022, appendix B.
    """
    dense = num_parameters(config) - config.vocab_size * config.dim
    head_dim = config.dim // config.num_heads
    attention = config.num_layers * config.num_heads * 2 * head_dim * sequence_length
    return 6.0 * (dense + attention)

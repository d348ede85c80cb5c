"""Parameters and FLOPs of a decoder-only transformer."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from ..api.v1alpha1.recipe import Model


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names, such as the repository's on the Hugging Face hub."""
    vocab_size: int
    dim: int
    """Width of the residual stream."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a head; num_heads x head_dim need not be dim."""
    ffn_dim: int
    gated_ffn: bool = True
    """Three matrices in the feed-forward part (SwiGLU), otherwise two (GELU)."""
    qk_norm: bool = False
    """A norm over each head's query and key."""
    qkv_bias: bool = False
    biases: bool = False
    """Biases of all other linear layers of a block."""
    layer_norm: bool = False
    """Norms with a bias (LayerNorm), otherwise RMSNorm."""
    tied_embeddings: bool = False
    """The head's matrix is the embedding's."""
    learned_positions: int = 0
    """Rows of a learned position embedding; 0: rotary or none."""
    max_sequence_length: int = 0
    """Longest sequence that the model was made for; 0: not known."""
    source: str = ""


class Counts(msgspec.Struct, frozen=True):
    """Number of parameters of each FSDP group: embedding, one layer, and norm with head."""

    embedding: int
    layer: int
    head: int
    num_layers: int
    matrices: int
    """Parameters of one layer's matrices, which a tensor axis divides and Muon updates."""

    @property
    def total(self) -> int:
        return self.embedding + self.num_layers * self.layer + self.head

    @property
    def largest_block(self) -> int:
        return max(self.embedding, self.layer, self.head)


def count_parameters(model: Architecture) -> Counts:
    """Exact for attention with grouped queries and a feed-forward part of two or three matrices."""
    d, heads = model.dim, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    norm = d * (1 + model.layer_norm)
    matrices = d * (2 * heads + 2 * keys) + (2 + model.gated_ffn) * d * model.ffn_dim
    layer = matrices + 2 * norm
    layer += 2 * model.head_dim * model.qk_norm
    if model.qkv_bias:
        layer += heads + 2 * keys
    if model.biases:
        layer += d + (1 + model.gated_ffn) * model.ffn_dim + d
    return Counts(
        embedding=(model.vocab_size + model.learned_positions) * d,
        layer=layer,
        head=norm + (0 if model.tied_embeddings else d * model.vocab_size),
        num_layers=model.num_layers,
        matrices=matrices,
    )


def block_matrices(model: Architecture) -> dict[tuple[int, int], int]:
    """(rows, columns) of the matrices of a block, each with how many there are."""
    d, heads = model.dim, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    shapes = [(heads, d), (keys, d), (keys, d), (d, heads), (d, model.ffn_dim)]
    shapes += [(model.ffn_dim, d)] * (1 + model.gated_ffn)
    return dict(Counter(shapes))


def factor_rank(shape: tuple[int, int], fraction: float) -> int:
    """Columns of the factor that Dion keeps of such a matrix."""
    return max(1, math.ceil(fraction * min(shape)))


def of_recipe(model: Model) -> Architecture:
    """The architecture that the recipe trains: RMSNorm, SwiGLU, no biases, untied head."""
    return Architecture(
        name="the recipe's model",
        vocab_size=model.vocab_size,
        dim=model.dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.dim // model.num_heads,
        ffn_dim=model.ffn,
        qk_norm=model.qk_norm,
    )


def attention_flops_per_token(model: Architecture, sequence_length: int) -> float:
    """FLOPs of the products of queries with keys and of weights with values, forward and backward,
    as if attention were not causal."""
    width = 2 * model.num_heads * model.head_dim
    return 6.0 * model.num_layers * width * sequence_length


def flops_per_token(model: Architecture, sequence_length: int) -> float:
    """Model FLOPs of one token, forward and backward, without recomputation.

    6 x (parameters - embedding) + 6 x layers x heads x 2 head_dim x sequence, attention counted in
    full although it is causal. A tied embedding is a head as well. Source: TorchTitan,
    get_dense_model_nparams_and_flops.
    """
    counts = count_parameters(model)
    dense = counts.total - counts.embedding
    if model.tied_embeddings:
        dense += model.dim * model.vocab_size
    return 6.0 * dense + attention_flops_per_token(model, sequence_length)

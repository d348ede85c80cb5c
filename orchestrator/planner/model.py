"""The recipe's transformer in numbers: parameters by block, FLOPs of a token.

Owns: the counts. They equal those of workers/training/models (tested). Must not: know meshes.
"""

from __future__ import annotations

import msgspec

from ..api.v1alpha1.recipe import Model, Pretrain


class Counts(msgspec.Struct, frozen=True):
    """Parameters of each FSDP group: embedding, one layer, and norm + head."""

    embedding: int
    layer: int
    head: int
    num_layers: int

    @property
    def total(self) -> int:
        return self.embedding + self.num_layers * self.layer + self.head

    @property
    def largest_block(self) -> int:
        return max(self.embedding, self.layer, self.head)


def count_parameters(model: Model) -> Counts:
    """Exact numbers for RMSNorm, grouped-query attention without biases, SwiGLU, untied head."""
    d, head_dim = model.dim, model.dim // model.num_heads
    attention = d * d + 2 * d * model.kv_heads * head_dim + d * d  # query, key and value, output
    return Counts(
        embedding=model.vocab_size * d,
        layer=attention + 3 * d * model.ffn + 2 * d,
        head=d + d * model.vocab_size,
        num_layers=model.num_layers,
    )


def flops_per_token(settings: Pretrain) -> float:
    """Model FLOPs of one token, forward and backward, without recomputation.

    6 x (parameters - embedding) + 6 x layers x heads x 2 head_dim x sequence, attention counted in
    full although it is causal. Source: TorchTitan, get_dense_model_nparams_and_flops.
    """
    model, counts = settings.model, count_parameters(settings.model)
    attention = 6 * model.num_layers * 2 * model.dim * settings.data.sequence_length
    return 6.0 * (counts.total - counts.embedding) + attention

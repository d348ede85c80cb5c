"""Settings of the pre-training recipe: what `holdfast plan` computes with and the workers obey.

Owns: these fields. The recipe itself is workers/training/recipes/pretrain.py.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import Auto, Part


class Model(Part):
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, untied head."""

    vocab_size: int = Field(default=256, ge=2, le=limits.MAX_VOCABULARY)
    """256: every byte is a token."""
    dim: int = Field(default=256, ge=8, le=limits.MAX_WIDTH)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1, le=limits.MAX_LAYERS)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1, le=limits.MAX_WIDTH)
    """Query heads; dim is a multiple of twice their number."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=limits.MAX_WIDTH)
    """Fewer than numHeads is grouped-query attention; left out: numHeads."""
    ffn_dim: int | None = Field(default=None, ge=8, le=limits.MAX_WIDTH)
    """Width of the SwiGLU; left out: 8/3 dim, rounded up to a multiple of 32."""
    rope_theta: float = Field(default=10000.0, gt=0, allow_inf_nan=False)
    """Base of the rotary positions."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Model:
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"dim: got {self.dim}; expected a multiple of twice numHeads ({2 * self.num_heads})"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"numKvHeads: got {self.kv_heads}; expected a divisor of numHeads "
                f"({self.num_heads})"
            )
        return self

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def ffn(self) -> int:
        return self.ffn_dim or -(-8 * self.dim // 3 // 32) * 32


class Data(Part):
    """Text as bytes. A sample is a pure function of (seed, index): any world size sees the same."""

    source: str = Field(default="stdlib", min_length=1)
    """stdlib: the source text of the Python that runs the workers. Else a file or a directory,
    relative to workingDirectory, read as bytes."""
    sequence_length: int = Field(default=128, ge=2, le=limits.MAX_SEQUENCE)
    """Tokens of one sample."""


class Optimizer(Part):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """At the end of the warm-up."""
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1, allow_inf_nan=False)
    """What is left of it at the last step."""
    warmup_steps: int = Field(default=20, ge=0, le=limits.MAX_COUNT)
    """Steps from zero to the full learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1, allow_inf_nan=False)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1, allow_inf_nan=False)
    """Decay of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Decoupled; of matrices, not of norms."""
    gradient_clip: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Norm to clip to; 0: do not clip."""


class Pretrain(Part):
    """Next-token training from scratch."""

    steps: int = Field(default=100, ge=1, le=limits.MAX_COUNT)
    """Optimizer steps of the whole job."""
    global_batch: int = Field(default=8, ge=1, le=limits.MAX_COUNT)
    """Samples of one step over all ranks; the same at any world size."""
    micro_batch: int | Auto = "auto"
    """Samples of one forward pass on one rank. auto: all of the rank's share."""
    seed: int = Field(default=0, ge=-limits.MAX_SEED, le=limits.MAX_SEED)
    """Of initial weights and of the order of samples."""
    evaluate_every_steps: int = Field(default=0, ge=0, le=limits.MAX_COUNT)
    """Loss on held-out text every Nth step; 0: never."""
    compile: bool = False
    """torch.compile each block."""
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _micro_positive(self) -> Pretrain:
        if self.micro_batch != "auto" and self.micro_batch < 1:
            raise ValueError(f"microBatch: got {self.micro_batch}; expected auto or a number >= 1")
        return self


class Recipe(Part):
    """A training loop that ships with Holdfast."""

    name: Literal["pretrain"]
    """Which recipe."""
    config: Pretrain = Pretrain()
    """Its settings."""

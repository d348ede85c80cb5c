"""Settings of the pre-training recipe (workers/training/recipes/pretrain.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from holdfast.orchestrator import limits

from .base import AutoOrCount, Choice, NoSettings, Part, Wait


class Model(Part):
    """A decoder-only transformer: RMSNorm, rotary position embedding, SwiGLU, untied head."""

    vocab_size: int = Field(default=256, ge=2, le=limits.MAX_COUNT)
    """Number of tokens in the vocabulary; 256: every byte is a token."""
    dim: int = Field(default=256, ge=8, le=limits.MAX_COUNT)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1, le=limits.MAX_COUNT)
    """Number of transformer blocks."""
    num_heads: int = Field(default=4, ge=1, le=limits.MAX_COUNT)
    """Number of query heads; dim must be a multiple of twice this number."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=limits.MAX_COUNT)
    """Number of key and value heads; fewer than numHeads is grouped-query attention. Default:
    numHeads."""
    ffn_dim: int | None = Field(default=None, ge=8, le=limits.MAX_COUNT)
    """Width of the SwiGLU. Default: 8/3 of dim, rounded up to a multiple of 32."""
    rope_theta: float = Field(default=10000.0, gt=0, allow_inf_nan=False)
    """Base of the rotary position embedding."""
    qk_norm: bool = False
    """true: an RMSNorm over each head's query and key, before the rotary position embedding."""

    @model_validator(mode="after")
    def _check_heads(self) -> Model:
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


class Validation(Part):
    """What the recipe evaluates: the same samples every time, at any world size and any seed."""

    source: str | None = Field(default=None, min_length=1)
    """A file or directory of its own, in the format of data.source. Default: the last part of
    data.source, which is not trained on."""
    share: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    """Share of the samples of data.source that is kept for validation. Default: 0.05; 0 trains on
    all of them. With a source of its own: nothing is kept."""
    samples: AutoOrCount = "auto"
    """Samples of one evaluation, spread evenly over the validation data. auto: 64, or all where
    there are fewer."""

    @model_validator(mode="after")
    def _check_share(self) -> Validation:
        if self.source is not None and self.share is not None:
            raise ValueError(
                f"share: got {self.share:g} with its own source; expected one of the two; "
                f"remove share"
            )
        return self

    @property
    def held_out_share(self) -> float:
        return 0.05 if self.share is None else self.share


class Data(Part):
    """Documents, packed into samples of sequenceLength tokens. Each sample is trained on once an
    epoch at any world size, in an order that depends on (seed, epoch) only."""

    source: str = Field(default="stdlib", min_length=1)
    """stdlib: the source text of the Python that runs the workers; otherwise a file, or a directory
    with all files below it, relative to workingDirectory."""
    format: Literal["text", "uint16", "uint32"] = "text"
    """text: each file is a document, one token per byte, and byte 255, which no UTF-8 text has,
    ends it. uint16, uint32: files of such tokens, little-endian, without a header, with the ends of
    documents as the tokenizer wrote them; of a directory the files NAME.bin."""
    sequence_length: int = Field(default=128, ge=2, le=limits.MAX_COUNT)
    """Tokens of one sample."""
    validation: Validation = Validation()

    @model_validator(mode="after")
    def _check_format(self) -> Data:
        if "stdlib" in (self.source, self.validation.source) and self.format != "text":
            raise ValueError(
                f"format: got {self.format} with source stdlib; expected text; name a file of "
                f"tokens in source"
            )
        return self


class Loss(Part):
    """Cross entropy of the next token, as the mean over all tokens of the global batch."""

    z_loss: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the square of log Z in the training loss, Z being the sum of exp(logits); 1e-4
    keeps the logits of long runs near 0. The validation loss is without it."""
    chunk_tokens: int = Field(default=0, ge=0, le=limits.MAX_COUNT)
    """Tokens of a micro-batch whose logits exist at the same time; backward computes them again,
    which is one more product with the head. 0: all tokens."""


class Decay(Part):
    """A decay of the learning rate."""

    min_ratio: float = Field(default=0.1, ge=0, le=1, allow_inf_nan=False)
    """Share of learningRate that remains at the last step."""


class LateDecay(Decay):
    """A linear decay at the end."""

    decay_steps: int | None = Field(default=None, ge=1, le=limits.MAX_COUNT)
    """Steps of the decay. Default: a tenth of steps."""


class LearningRateSchedule(Choice):
    """The learning rate after the warm-up. Default: cosine."""

    choices = ("cosine", "linear", "constant", "wsd")
    default_choice = "cosine"

    cosine: Decay | None = None
    """A half wave from learningRate down to the minimum, over all remaining steps."""
    linear: Decay | None = None
    """The same along a line."""
    constant: NoSettings | None = None
    """learningRate."""
    wsd: LateDecay | None = None
    """learningRate, and a linear decay to the minimum over the last decaySteps."""


class AdamW(Part):
    """Settings of AdamW."""

    in_backward: bool = False
    """true: step each block as soon as backward has its gradients, and free them. It excludes
    clipping, several micro-batches, float16, and DDP of several workers."""


class Muon(Part):
    """Settings of Muon."""

    momentum: float = Field(default=0.95, ge=0, lt=1, allow_inf_nan=False)
    """Decay rate of the average of gradients."""


class DionSettings(Muon):
    """Settings of Dion."""

    rank_fraction: float = Field(default=0.25, gt=0, le=1, allow_inf_nan=False)
    """Rank of a matrix's update, as a share of its smaller side."""


class Optimizer(Choice):
    """The optimizer, at most one of adamw, adamw8bit, muon and dion, with linear warm-up, then a
    schedule of the learning rate. Default: adamw."""

    choices = ("adamw", "adamw8bit", "muon", "dion")
    default_choice = "adamw"

    adamw: AdamW | None = None
    """AdamW (fused) for all parameters."""
    adamw8bit: NoSettings | None = Field(default=None, alias="adamw8bit")
    """AdamW with moments of 8 bits for matrices whose rows are multiples of 256 values; the workers
    need the package torchao."""
    muon: Muon | None = None
    """Muon for the matrices of the blocks, and AdamW for embedding, norms and head. Its updates are
    scaled so that learningRate and weightDecay of AdamW serve."""
    dion: DionSettings | None = None
    """Dion in the place of Muon."""
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Learning rate at the end of the warm-up."""
    learning_rate_schedule: LearningRateSchedule = LearningRateSchedule()
    warmup_steps: int = Field(default=20, ge=0, le=limits.MAX_COUNT)
    """Steps over which the learning rate rises from 0 to learningRate."""
    beta1: float = Field(default=0.9, ge=0, lt=1, allow_inf_nan=False)
    """Decay rate of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1, allow_inf_nan=False)
    """Decay rate of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Decoupled weight decay of matrices; norms have none."""
    gradient_clip: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Largest norm of the gradient; larger ones are clipped to it. 0: no clipping."""

    @property
    def in_backward(self) -> bool:
        return self.adamw is not None and self.adamw.in_backward


class Pretrain(Part):
    """Next-token training from scratch."""

    steps: int = Field(default=100, ge=1, le=limits.MAX_COUNT)
    """Number of optimizer steps of the whole job."""
    global_batch: int = Field(default=8, ge=1, le=limits.MAX_COUNT)
    """Samples of one step over all ranks; the same at any world size."""
    micro_batch: AutoOrCount = "auto"
    """Samples of one forward pass on one rank. auto: all samples of the rank in one pass, or in as
    few passes as fit where the memory of the devices is known; with a pipeline one sample, as more
    micro-batches leave its ranks idle for a smaller part of a step."""
    seed: int = Field(default=0, ge=-limits.MAX_SEED, le=limits.MAX_SEED)
    """Seed of the initial weights and of the order of samples."""
    evaluate_every_steps: int = Field(default=0, ge=0, le=limits.MAX_COUNT)
    """Compute the mean loss of the tokens of data.validation after every Nth step; 0: never."""
    compile: bool = False
    """true: compile each block with torch.compile."""
    min_step_s: Wait = 0.0
    """Each rank sleeps at the end of a step that took less than this. For trying out faults and
    resizes with a small model where other work needs the processors; 0: never."""
    model: Model = Model()
    data: Data = Data()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _check_parts(self) -> Pretrain:
        data, validation = self.data, self.data.validation
        if data.format == "text" and self.model.vocab_size < 256:
            raise ValueError(
                f"model.vocabSize: got {self.model.vocab_size}; expected at least 256 with "
                f"data.format text, where every byte is a token"
            )
        if self.evaluate_every_steps and validation.source is None and validation.share == 0:
            raise ValueError(
                f"evaluateEverySteps: got {self.evaluate_every_steps} without validation data; "
                f"expected data.validation.source, or a share above 0"
            )
        warmup, wsd = self.optimizer.warmup_steps, self.optimizer.learning_rate_schedule.wsd
        if wsd and wsd.decay_steps and warmup + wsd.decay_steps > self.steps:
            raise ValueError(
                f"optimizer.learningRateSchedule.wsd.decaySteps: got {wsd.decay_steps} after "
                f"{warmup} warmupSteps; expected both within steps ({self.steps})"
            )
        return self

    def samples_per_pass(self, share: int, pipeline: int, chosen: int = 0) -> int:
        """Samples of one forward pass, of a rank that has `share` of them in a step. `chosen`: what
        auto is by the memory of the devices; 0: that is not known."""
        if self.micro_batch == "auto":
            return min(chosen, share) if chosen else share if pipeline == 1 else 1
        return min(self.micro_batch, share)


class Recipe(Part):
    """A training loop that is part of Holdfast."""

    name: Literal["pretrain"]
    """Name of the recipe."""
    config: Pretrain = Pretrain()
    """Settings of the recipe."""

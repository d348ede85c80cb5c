"""The recipes: what the control plane asks of each, and the settings of those in the tree.

A package adds a recipe with an entry point of the group `holdfast.recipes`, NAME = module:CLASS,
where CLASS extends RecipeConfig and names the function that trains.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import Problem, installation
from holdfast.orchestrator.parts import PARTS, is_installed

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
    """Samples to evaluate: the same ones every time, at any world size and any seed."""

    source: str | None = Field(default=None, min_length=1)
    """A file or directory of its own, in the format of data.source. Default: the last part of
    data.source, which is not trained on."""
    share: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    """Share of the samples of data.source that is kept for validation. Default: 0.05; 0 trains on
    all of them."""
    samples: AutoOrCount = "auto"
    """Samples of one evaluation, spread evenly over the validation data. auto: at most 64."""

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
    """text: each file is a document, one token per byte, and byte 255 ends it. uint16, uint32:
    files of such tokens, little-endian, without a header; of a directory the files NAME.bin."""
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
    keeps the logits of long runs near 0."""
    chunk_tokens: int = Field(default=0, ge=0, le=limits.MAX_COUNT)
    """Tokens of a micro-batch whose logits exist at the same time; backward computes them again.
    0: all tokens."""


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


class RecipeConfig(Part):
    """Settings of every recipe."""

    main: ClassVar[str]
    """`module:function` that trains a TrainingJob in a worker."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Axes of spec.parallelism, beside shard and replicate, over which it divides a model."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that each node imports before it forks workers."""

    global_batch: int = Field(default=8, ge=1, le=limits.MAX_COUNT)
    """Samples of one step over all ranks; the same at any world size."""
    micro_batch: AutoOrCount = "auto"
    """Samples of one forward pass on one rank. auto: all samples of the rank, or as many as fit
    where the memory of the devices is known; with a pipeline one."""
    seed: int = Field(default=0, ge=-limits.MAX_SEED, le=limits.MAX_SEED)
    """Seed of the initial weights and of the order of samples."""
    evaluate_every_steps: int = Field(default=0, ge=0, le=limits.MAX_COUNT)
    """Compute the mean loss of the validation data after every Nth step; 0: never."""
    compile: bool = False
    """true: compile each block with torch.compile."""
    min_step_s: Wait = 0.0
    """Each rank sleeps at the end of a step that took less than this, for trying out faults with a
    small model; 0: never."""
    optimizer: Optimizer = Optimizer()

    @property
    def total_steps(self) -> int:
        """Steps of the whole job; 0: the workers report it."""
        return 0

    @property
    def result(self) -> str:
        """Directory that the workers write the result to; empty: checkpoints have it."""
        return ""

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that its workers import beside every worker's."""
        return ()

    def rejects_axis(self, axis: str) -> str:
        """Reason why it divides no model over an axis of spec.parallelism; empty: it does."""
        if axis in self.axes:
            return ""
        return f"models are divided over {' and '.join(('shard', *self.axes))} only"

    def sources(self) -> Iterator[tuple[str, str]]:
        """(field, file or directory) that the workers read."""
        return iter(())

    def _check_decay(self) -> None:
        """Raises ValueError."""
        warmup, wsd = self.optimizer.warmup_steps, self.optimizer.learning_rate_schedule.wsd
        steps = self.total_steps
        if wsd and wsd.decay_steps and steps and warmup + wsd.decay_steps > steps:
            raise ValueError(
                f"optimizer.learningRateSchedule.wsd.decaySteps: got {wsd.decay_steps} after "
                f"{warmup} warmupSteps; expected both within steps ({steps})"
            )

    def samples_per_pass(self, share: int, pipeline: int, chosen: int = 0) -> int:
        """Samples of one forward pass, of a rank that has `share` of them in a step. `chosen`: what
        auto is by the memory of the devices; 0: that is not known."""
        if self.micro_batch == "auto":
            return min(chosen, share) if chosen else share if pipeline == 1 else 1
        return min(self.micro_batch, share)


class Pretrain(RecipeConfig):
    """Next-token training from scratch."""

    main = PARTS["recipe pretrain"]
    axes = ("tensor", "context", "pipeline")

    steps: int = Field(default=100, ge=1, le=limits.MAX_COUNT)
    """Number of optimizer steps of the whole job."""
    model: Model = Model()
    data: Data = Data()
    loss: Loss = Loss()

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
        self._check_decay()
        return self

    @property
    def total_steps(self) -> int:
        return self.steps

    def sources(self) -> Iterator[tuple[str, str]]:
        data = self.data
        for name, path in (("source", data.source), ("validation.source", data.validation.source)):
            if path is not None and path != "stdlib":
                yield f"data.{name}", path


class Adapter(Part):
    """Low-rank matrices beside the frozen matrices of a model, by PEFT."""

    rank: int = Field(default=16, ge=1, le=limits.MAX_COUNT)
    """Rank of the matrices."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """The product of both is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False)
    """Share of the inputs of the adapters that is set to 0 in training."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the layers, such as q_proj. Default: all linear layers but the head."""


class Finetune(RecipeConfig):
    """Training of a model in a directory as transformers writes it. The default learningRate is
    1e-5 for method full and 2e-4 for adapters, weightDecay's is 0."""

    main = PARTS["recipe finetune"]
    axes = ("tensor",)
    preload = ("transformers", "peft")

    model: str = Field(min_length=1)
    """Directory with config.json, safetensors and tokenizer; paths are relative to
    workingDirectory."""
    data: str = Field(min_length=1)
    """JSONL file. Each line has prompt and completion, messages, or text."""
    method: Literal["full", "lora", "qlora"] = "full"
    """full: all weights are trained. lora: adapters beside frozen weights. qlora: beside frozen
    weights in NF4; the workers need the package torchao."""
    adapter: Adapter = Adapter()
    output: str = Field(min_length=1)
    """Directory that rank 0 writes after the last step: a model of transformers, or an adapter of
    PEFT."""
    merge: bool = False
    """true: add the adapter to the weights of the model in output."""
    epochs: int = Field(default=1, ge=1, le=limits.MAX_COUNT)
    """Number of times that each sample is trained on."""
    steps: int | None = Field(default=None, ge=1, le=limits.MAX_COUNT)
    """Number of optimizer steps of the whole job. Default: all steps of all epochs."""
    sequence_length: int = Field(default=1024, ge=2, le=limits.MAX_COUNT)
    """Tokens of one sample, which several documents share; longer documents are cut."""
    validation: str | None = Field(default=None, min_length=1)
    """JSONL file that is evaluated, and not trained on."""

    @model_validator(mode="before")
    @classmethod
    def _fill_rate(cls, values: Any) -> Any:
        """A learning rate for the method: adapters need a larger one than whole models."""
        written = values.get("optimizer", {}) if isinstance(values, dict) else None
        if not isinstance(written, dict) or {"learningRate", "learning_rate"} & {*written}:
            return values
        rate = 1e-5 if values.get("method", "full") == "full" else 2e-4
        return {**values, "optimizer": {"weightDecay": 0.0, "learningRate": rate, **written}}

    @model_validator(mode="after")
    def _check_parts(self) -> Finetune:
        if self.evaluate_every_steps and self.validation is None:
            raise ValueError(
                f"evaluateEverySteps: got {self.evaluate_every_steps} without validation data; "
                f"expected validation: FILE.jsonl"
            )
        if self.steps is not None and self.epochs > 1:
            raise ValueError(f"epochs: got {self.epochs} with steps; expected one; remove epochs")
        if self.method == "full" and self.adapter != Adapter():
            raise ValueError(
                "adapter: got settings with method full; expected them with lora or qlora; remove "
                "adapter, or set method: lora"
            )
        if self.merge and self.method != "lora":
            raise ValueError(
                f"merge: got true with method {self.method}; expected it with lora; remove merge"
                + ("; PEFT merges the adapter into the model's directory" * (self.method != "full"))
            )
        if self.optimizer.chosen != "adamw" or self.optimizer.in_backward:
            raise ValueError(
                f"optimizer.{self.optimizer.chosen}: got it with recipe finetune; expected adamw "
                f"without inBackward; remove it"
            )
        self._check_decay()
        paths = {posixpath.normpath(path) for _, path in self.sources()}
        if posixpath.normpath(self.output) in paths | {".", ".."}:
            raise ValueError(
                f"output: got {self.output}, which is another directory of the job; expected one "
                f"of its own, which is replaced"
            )
        return self

    @property
    def total_steps(self) -> int:
        return self.steps or 0

    @property
    def result(self) -> str:
        return self.output

    @property
    def packages(self) -> tuple[str, ...]:
        return ("transformers", "accelerate", "peft", *["torchao"] * (self.method == "qlora"))

    def rejects_axis(self, axis: str) -> str:
        if axis == "tensor" and self.method == "qlora":
            return "weights of method qlora are divided over shard only"
        return super().rejects_axis(axis)

    def sources(self) -> Iterator[tuple[str, str]]:
        yield from (("model", self.model), ("data", self.data))
        if self.validation is not None:
            yield "validation", self.validation


RECIPES: dict[str, type[RecipeConfig]] = {"pretrain": Pretrain, "finetune": Finetune}
"""Settings of the recipes in the tree."""


def config_of(name: str) -> type[RecipeConfig]:
    """The settings of a recipe, also of an installed package. Raises ValueError."""
    if name in RECIPES:
        return RECIPES[name]
    others = {point.name: point for point in entry_points(group="holdfast.recipes")}
    if name not in others:
        recipes = ", ".join((*RECIPES, *sorted(others)))
        raise ValueError(f"got {name}; expected one of {recipes}; another needs its package")
    config: type[RecipeConfig] = others[name].load()
    return config


def _open_mapping(schema: dict[str, Any]) -> None:
    """The settings depend on the name, which no structural schema can say; see schema.py."""
    text = schema["description"]
    schema.clear()
    schema.update(
        {"type": "object", "description": text, "x-kubernetes-preserve-unknown-fields": True}
    )


class Recipe(Part):
    """A training loop of Holdfast or of an installed package."""

    name: str
    """pretrain, finetune, or the name of an installed package's recipe."""
    config: SerializeAsAny[RecipeConfig] = Field(
        default=Pretrain(), validate_default=True, json_schema_extra=_open_mapping
    )
    """Settings of every recipe, and of this one, below."""

    def missing(self) -> Problem | None:
        """Problem of a recipe whose part is not installed here; None: it is."""
        module = self.config.main.partition(":")[0]
        if is_installed(module):
            return None
        fix = installation("train") if module.startswith("holdfast.") else "install its package"
        field, got = "spec.entrypoint.recipe.name", f"{self.name}, without its {module}"
        return Problem(field, got, "an installed recipe", fix)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        config_of(name)
        return name

    @field_validator("config", mode="wrap")
    @classmethod
    def _read_config(cls, value: Any, _: Any, info: ValidationInfo) -> Any:
        if "name" not in info.data:
            return Pretrain()  # the name is the problem
        config = config_of(info.data["name"])
        other = isinstance(value, RecipeConfig) and not isinstance(value, config)
        return config.model_validate({} if other else value)  # other: the default


def pretraining(recipe: Recipe | None) -> Pretrain | None:
    """The settings of pretrain; None for another recipe, and without one."""
    config = recipe.config if recipe is not None else None
    return config if isinstance(config, Pretrain) else None

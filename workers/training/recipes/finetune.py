"""The fine-tuning recipe: a model of transformers, whole or with adapters of PEFT."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from holdfast import session
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.recipe import Finetune
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import files
from holdfast.workers.checkpoint.param_names import plain_name
from holdfast.workers.training import loop, pretrained
from holdfast.workers.training.data import MicroBatch
from holdfast.workers.training.documents import CONFIG, Conversations
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.loss import losses_in_chunks
from holdfast.workers.training.optimizers import make_optimizer
from holdfast.workers.training.parallel import Parallel
from holdfast.workers.training.parallel.precision import parameter_dtype

MARKER = ".holdfast"
"""An empty file in each result: a directory without it is not replaced."""


@dataclass
class Tuner(loop.BaseTrainer):
    """The objects that a step needs."""

    config: Finetune
    data: Conversations
    keep = "trainable"

    def conclude(self) -> None:
        """Rank 0 writes the result, complete or not at all; a model in parts, as it is gathered."""
        with self.session.phase("save"):
            self._export()

    def _export(self) -> None:
        directory, model = self.session.directory, cast(Any, self.parallel.model)
        target = files.resolve(directory, self.config.output)
        partial = target.with_name(f"{target.name}.partial")
        adapter = self.config.method != "full" and not self.config.merge
        values = _adapter(model).items() if adapter else _whole_model(model, self.session)
        if self.session.rank:
            for _ in values:  # each rank has a part of each
                pass
            return
        try:
            shutil.rmtree(partial, ignore_errors=True)
            if adapter:
                model.save_pretrained(partial, state_dict=dict(values))
            else:
                pretrained.write(values, partial)
                written = model.get_base_model() if self.config.merge else model
                written.config.architectures = [type(written).__name__]
                written.config.save_pretrained(partial)
                written.generation_config.save_pretrained(partial)
            source = files.resolve(directory, self.config.model)
            pretrained.tokenizer_of(source).save_pretrained(partial)
            (partial / MARKER).touch()
            old = target.with_name(f"{target.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():  # an earlier result; `build` has checked
                target.rename(old)
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)
            print(f"wrote {target}", flush=True)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{CONFIG}.output: got {target}, which cannot be written ({error}); expected room "
                "for the result; free some or change output, and start the job again: the last "
                "checkpoint has the weights"
            ) from None


def main(job: TrainingJob) -> None:
    """Trains until the last step, then writes the result. Raises UserError for a spec without this
    recipe."""
    recipe = job.spec.entrypoint.recipe
    config = recipe.config if recipe is not None else None
    if not isinstance(config, Finetune):
        raise UserError("spec.entrypoint.recipe: got another recipe; expected finetune")
    loop.run(job, lambda s: build(job, config, s))


def build(job: TrainingJob, config: Finetune, s: session.Session) -> Tuner:
    """Model, optimizer and data, before restore."""
    mesh = job.spec.parallelism
    expect_free(config, s.directory)
    directory = files.resolve(s.directory, config.model)
    # What is trained is float32; frozen weights have the format of forward and backward.
    frozen = parameter_dtype(mesh.precision, s.device)
    dtype = torch.float32 if config.method == "full" else frozen
    model = pretrained.build(directory, dtype)
    model.config.use_cache = False
    plan = pretrained.plan_of(model.config, mesh.tensor) if mesh.tensor > 1 else {}
    tokenizer = pretrained.tokenizer_of(directory)
    data = Conversations(config, s.directory, tokenizer, model.config.vocab_size, s.tick)
    blocks, embedding, head = (
        pretrained.blocks_of(model), model.get_input_embeddings(), model.get_output_embeddings()
    )  # fmt: skip
    tied = embedding.weight is head.weight
    if config.method != "full":
        model = with_adapters(model, config)
    quantize = config.method == "qlora"
    if quantize:
        pretrained.expect_whole_groups(blocks, s.shape)
    parallel = Parallel(
        model,
        blocks,
        [] if tied else [embedding, head],
        s,
        mesh,
        config.compile,
        lambda axis: pretrained.divide(model, plan, axis),
        prepare=partial(pretrained.quantize, model, directory, s) if quantize else None,
    )
    if mesh.tensor == 1:  # which divides the logits itself
        give_losses(model)

    def call(module: nn.Module, batch: MicroBatch) -> Tensor:
        """Logits, or losses. Positions that begin again keep attention inside documents."""
        model.get_output_embeddings().targets_bt = batch.targets_bt
        return cast(Tensor, module(batch.inputs_bt, position_ids=batch.positions_t).logits)

    parallel.call = call

    def initialise(module: nn.Module) -> None:
        if tied:  # each module has got memory of its own
            head.weight = embedding.weight
        restored = s.restoring and config.method == "full"
        _fill(module, None if restored else directory, config.seed)

    parallel.materialize(initialise)
    trained = {n: p for n, p in parallel.named_shards().items() if p.requires_grad}
    total, ours = (
        sum(p.numel() for p in model.parameters() if p.requires_grad or whole)
        for whole in (True, False)
    )
    warmup, steps = config.optimizer.warmup_steps, data.steps
    short = f", warmupSteps {warmup} of {steps} steps" * (warmup >= steps)
    return Tuner(
        config,
        s,
        parallel,
        make_optimizer(config.optimizer, trained),
        data,
        steps=steps,
        sequence_length=config.sequence_length,
        flops_per_token=4.0 * total + 2.0 * ours,  # a frozen parameter has no gradient
        title=f"finetune {config.method}: {total / 1e6:.1f} M parameters, "
        f"{ours / 1e6:.2f} M trained{data.train.losses()}{short}",
    )


LOGITS = 2**27
"""Logits of a rank that exist at a time, in float32 half a GiB, some three times."""


def give_losses(model: Any) -> None:
    """Make the head compute the losses of `targets_bt`: the logits of 8,192 tokens of Llama 3 need
    about 13 GB."""
    head, scaling = model.get_output_embeddings(), getattr(model.config, "logits_scaling", 1.0)
    chunk_tokens, logits = max(1, LOGITS // model.config.vocab_size), head.forward

    def losses(x_btd: Tensor) -> Tensor:
        if x_btd.shape[0] * x_btd.shape[1] <= chunk_tokens:
            return cast(Tensor, logits(x_btd))
        parts = (x_btd, head.targets_bt, chunk_tokens)
        # The model divides what its head returns.
        return losses_in_chunks(lambda x_nd: logits(x_nd) / scaling, *parts) * scaling

    head.forward = losses


def _fill(module: nn.Module, directory: Path | None, seed: int) -> None:
    """Give adapters their first values, and all others those of the directory, if one is given."""
    named = {plain_name(name): weight for name, weight in module.named_parameters()}
    adapters = {name: weight for name, weight in named.items() if ".lora_" in name}
    if directory is not None:
        others = {
            pretrained.stored_name(name): weight
            for name, weight in named.items()
            if name not in adapters and not pretrained.is_quantized(weight)
        }
        pretrained.load(others, directory)
    for name, parameter in adapters.items():
        deviation = 0.0 if ".lora_B." in name else (3.0 * parameter.shape[1]) ** -0.5
        fill(parameter, seed, name, deviation)


def expect_free(config: Finetune, directory: str) -> None:
    """Raises UserError for an output that would replace something else than an earlier result."""
    target = files.resolve(directory, config.output).resolve()
    used = [files.resolve(directory, path).resolve() for _, path in config.sources()]
    got = f"{CONFIG}.output: got {target}"
    for path in (*used, Path(directory).resolve()):
        if path.is_relative_to(target) or (path in used and target.is_relative_to(path)):
            raise UserError(
                f"{got}, which is, has or is in {path}; expected a directory of its own, as it is "
                "replaced"
            )
    if target.exists() and not (target / MARKER).is_file():
        raise UserError(
            f"{got}, which exists and is not an earlier result; expected a new directory; "
            "move it away, or choose another"
        )


def with_adapters(model: Any, config: Finetune) -> Any:
    from peft import LoraConfig, get_peft_model

    settings, head = config.adapter, model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    layers = [name for name, module in model.named_modules()
              if isinstance(module, nn.Linear) and not (tied and module is head)]  # fmt: skip
    ends = {name.rpartition(".")[2] for name in layers}
    for target in settings.targets:
        meant = [name for name, _ in model.named_modules()
                 if name == target or name.endswith(f".{target}")]  # fmt: skip
        if not meant or {*meant} - {*layers}:
            raise UserError(
                f"{CONFIG}.adapter.targets: got {target}; the model has no such linear layer; "
                f"expected some of {', '.join(sorted(ends))}; correct it, or remove targets"
            )
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora, low_cpu_mem_usage=True)


def _adapter(model: nn.Module) -> dict[str, Tensor]:
    """Names and values of the adapters; each rank takes part."""
    named = ((plain_name(name), p) for name, p in model.named_parameters())
    return {name: pretrained.gathered(p) for name, p in named if ".lora_" in name}


def _whole_model(model: Any, s: session.Session) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the model's directory, with adapters added to the weights; on rank 0,
    each takes part."""
    modules = {plain_name(name): module for name, module in model.named_modules()}
    adapters = _adapter(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        value = pretrained.gathered(parameter)
        s.tick()
        if s.rank:
            continue
        owner = plain_name(name).removesuffix(".base_layer.weight")
        if f"{owner}.lora_A.default.weight" in adapters:
            first, second = (adapters[f"{owner}.lora_{letter}.default.weight"] for letter in "AB")
            value = value.float() + modules[owner].scaling["default"] * (second @ first)
        yield pretrained.stored_name(name), value.to(model.config.dtype).cpu()


if __name__ == "__main__":
    loop.main_without_agent(main)

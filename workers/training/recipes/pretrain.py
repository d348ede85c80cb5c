"""The pre-training recipe: next-token prediction with a decoder-only transformer.

The global batch is the same at any world size: ranks read slices of it, and the loss is normalised
by the tokens of the whole batch, so gradients differ between world sizes by rounding only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast import session
from holdfast.orchestrator.api.v1alpha1 import Pretrain, TrainingJob, load_job
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.workers import worker_transport
from holdfast.workers.session.order import BatchShare, share
from holdfast.workers.training.data import Dataset, MicroBatch
from holdfast.workers.training.loss import token_losses
from holdfast.workers.training.models.transformer import (
    Transformer,
    flops_per_token,
    num_parameters,
)
from holdfast.workers.training.optimizers import Optimizers, make_optimizer
from holdfast.workers.training.parallel import Parallel, tensor
from holdfast.workers.training.parallel.pipeline import Pipeline
from holdfast.workers.training.schedule import learning_rate


@dataclass
class Trainer:
    """The objects that a step needs."""

    config: Pretrain
    session: session.Session
    parallel: Parallel
    optimizer: torch.optim.Optimizer | Optimizers
    data: Dataset

    @property
    def tokens_per_step(self) -> int:
        return self.config.global_batch * self.config.data.sequence_length

    def loss(self, output: Tensor, batch: MicroBatch) -> Tensor:
        """This rank's part of the mean over all tokens of the global batch. `output`: logits (B, T,
        V), or losses (B, T) where the head computes them."""
        losses = output
        if not self.config.loss.chunk_tokens:
            losses = token_losses(output.flatten(0, 1), batch.targets_bt.flatten(), self._z_loss)
        losses_bt = losses.view_as(batch.targets_bt)
        return (losses_bt.sum(1) * batch.weights_b).sum() / self.tokens_per_step

    def head_arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """Arguments of the model if its head computes the losses."""
        size = self.config.loss.chunk_tokens
        if not size:
            return {}
        return {"targets_bt": batch.targets_bt, "chunk_tokens": size, "z_loss": self._z_loss}

    @property
    def _z_loss(self) -> float:
        """None in an evaluation."""
        return self.config.loss.z_loss if self.parallel.model.training else 0.0


def main(job: TrainingJob) -> None:
    """Trains until config.steps. Raises UserError for a spec without this recipe."""
    recipe = job.spec.entrypoint.recipe
    if recipe is None:
        raise UserError("spec.entrypoint.recipe: got nothing; expected the recipe pretrain")
    config = recipe.config
    mesh = job.spec.parallelism
    s = session.init(_shard_without_agent(job), mesh.tensor, mesh.context, mesh.pipeline)
    trainer = build(job, config, s)
    start = s.restore(trainer.parallel.model, trainer.optimizer, trainer.parallel.loss_scale)
    if s.rank == 0:
        print(_first_line(trainer, start), flush=True)
    began = printed = time.perf_counter()
    for step in s.steps(config.steps):
        with s.attempt():
            loss, norm = train_step(trainer, step)
            if s.rank == 0:  # before s.step: a kill between prints the line twice, never not at all
                rate = trainer.tokens_per_step / (time.perf_counter() - printed)
                printed = time.perf_counter()
                epoch = (step + 1) * config.global_batch / len(trainer.data.train)
                text = f"step {step} loss {loss:.4f} norm {norm:.3f} tokens/s {rate:.0f}"
                print(f"{text} epoch {epoch:.2f}", flush=True)
            time.sleep(max(0.0, began + config.min_step_s - time.perf_counter()))
            began = time.perf_counter()
            s.step(step, loss=loss, tokens=trainer.tokens_per_step, flops=_flops(trainer))
            every = config.evaluate_every_steps
            if every and (step + 1) % every == 0:
                with s.phase("evaluate"):
                    validation_loss = evaluate(trainer)
                if s.rank == 0:
                    over = f"over {trainer.data.num_evaluated} samples"
                    print(f"step {step} validation loss {validation_loss:.4f} {over}", flush=True)
                began = printed = time.perf_counter()
    s.finish()
    session.leave()


def build(job: TrainingJob, config: Pretrain, s: session.Session) -> Trainer:
    """Model, optimizer and data, before restore."""
    with torch.device("meta"):
        model = Transformer(config.model)
    mesh = job.spec.parallelism
    pipeline = Pipeline(model, s, mesh) if s.shape.pipeline > 1 else None
    parallel = Parallel(
        model,
        list(model.blocks),
        model.edges(),
        s,
        mesh,
        config.compile,
        lambda axis: tensor.parallelize(model, axis),
        pipeline,
    )
    parallel.materialize(config.seed, model.standard_deviation)
    optimizer = make_optimizer(config.optimizer, parallel.named_shards())
    if config.optimizer.in_backward:  # a later step finds no gradients
        groups = (block.parameters() for block in parallel.blocks)
        parallel.shards.step_in_backward(groups, optimizer.step)
    trainer = Trainer(config, s, parallel, optimizer, Dataset(config, s.directory))
    parallel.arguments = trainer.head_arguments
    return trainer


def train_step(trainer: Trainer, step: int) -> tuple[float, float]:
    """One optimizer step; returns (loss over the global batch, gradient norm)."""
    config, s, parallel = trainer.config, trainer.session, trainer.parallel
    s.seed(config.seed, step)
    part = share(step, config.global_batch, s.data_parallel_rank, s.data_parallel_size)
    size = _samples_per_pass(config, s)
    batches = [_batch(trainer.data.batch, p) for p in micro_batches(part, size)]
    rate = learning_rate(config.optimizer, step, config.steps)
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    total = parallel.forward_backward(batches, trainer.loss)
    numbers = parallel.reduce_and_clip(total, config.optimizer.gradient_clip)
    if parallel.may_step(numbers):
        trainer.optimizer.step()
    elif s.rank == 0:
        assert parallel.loss_scale is not None
        scale = f"the loss scale is {parallel.loss_scale.value:g} now"
        print(f"step {step} changes nothing: the gradients overflow float16; {scale}", flush=True)
    trainer.optimizer.zero_grad()
    return numbers()


def _samples_per_pass(config: Pretrain, s: session.Session) -> int:
    part = share(0, config.global_batch, 0, s.data_parallel_size)
    attached = worker_transport.attached
    chosen = attached.assign.membership.micro_batch if attached else 0
    return config.samples_per_pass(len(part.indices), s.shape.pipeline, chosen)


def micro_batches(part: BatchShare, size: int) -> list[BatchShare]:
    """Slices of a rank's share; the same number on every rank, since each one communicates."""
    return [
        BatchShare(part.indices[at : at + size], part.weights[at : at + size])
        for at in range(0, len(part.indices), size)
    ]


def evaluate(trainer: Trainer) -> float:
    """Mean loss of the tokens of the validation samples, the same ones at every world size."""
    s, config, data = trainer.session, trainer.config, trainer.data
    part = share(0, data.num_evaluated, s.data_parallel_rank, s.data_parallel_size)
    # No larger than those of a training step, whose memory is known to suffice.
    size = _samples_per_pass(config, s)
    batches = [_batch(data.validation_batch, p) for p in micro_batches(part, size)]
    total = trainer.parallel.evaluate(batches, trainer.loss)
    return float(total) * config.global_batch / data.num_evaluated


def _batch(
    read: Callable[[tuple[int, ...]], tuple[Tensor, Tensor]], part: BatchShare
) -> MicroBatch:
    return MicroBatch(*read(part.indices), torch.tensor(part.weights))


def _shard_without_agent(job: TrainingJob) -> int | None:
    """The shard size of the spec, for a run without Holdfast, which has no membership. None: all
    ranks."""
    shard = job.spec.parallelism.shard
    return shard if isinstance(shard, int) else None


def _main_without_agent(arguments: list[str]) -> None:
    """`torchrun ... -m holdfast.workers.training.recipes.pretrain job.yaml`, without Holdfast."""
    if len(arguments) != 1:
        raise SystemExit("usage: python -m holdfast.workers.training.recipes.pretrain JOB.yaml")
    try:
        main(load_job(arguments[0]))
    except HoldfastError as error:
        raise SystemExit(f"{error}") from None


def _flops(trainer: Trainer) -> float:
    config = trainer.config
    return trainer.tokens_per_step * flops_per_token(config.model, config.data.sequence_length)


def _first_line(trainer: Trainer, start: int) -> str:
    config, s, data = trainer.config, trainer.session, trainer.data
    millions = num_parameters(config.model) / 1e6
    part = share(0, config.global_batch, 0, s.data_parallel_size)
    passes = micro_batches(part, _samples_per_pass(config, s))
    tokens = f"{config.global_batch} x {config.data.sequence_length} tokens"
    return (
        f"pretrain: {millions:.1f} M parameters, {s.shape.strategy} {s.shape.describe()}, "
        f"{s.device.type}, global batch {tokens} in {s.data_parallel_size} slices of "
        f"{len(passes)} x {len(passes[0].indices)}; {len(data.train)} samples an epoch, "
        f"{len(data.validation)} for validation; "
        f"steps {start} to {config.steps - 1}, generation {s.generation}"
    )


if __name__ == "__main__":
    _main_without_agent(sys.argv[1:])

"""The loop of the recipes: steps, evaluations, and the lines that rank 0 prints.

The global batch is the same at any world size: ranks read slices of it, and the loss is normalised
by the tokens of the whole batch, so gradients differ between world sizes by rounding only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast import session
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, load_job
from holdfast.orchestrator.api.v1alpha1.recipe import RecipeConfig
from holdfast.orchestrator.errors import HoldfastError
from holdfast.workers import worker_transport
from holdfast.workers.session.order import BatchShare, share
from holdfast.workers.training.data import Dataset, MicroBatch
from holdfast.workers.training.documents import Conversations
from holdfast.workers.training.loss import token_losses
from holdfast.workers.training.optimizers import Optimizers
from holdfast.workers.training.parallel import Parallel
from holdfast.workers.training.schedule import learning_rate


@dataclass
class BaseTrainer:
    """The objects that a step needs."""

    config: RecipeConfig
    session: session.Session
    parallel: Parallel
    optimizer: torch.optim.Optimizer | Optimizers
    data: Dataset | Conversations
    steps: int
    """Number of optimizer steps of the whole job."""
    sequence_length: int
    flops_per_token: float
    title: str
    """The recipe and its model in words."""

    keep: ClassVar[Literal["all", "trainable"]] = "all"
    """The parameters that checkpoints have."""
    num_targets: int = 1
    """Tokens of this step, or of this evaluation, over which the loss is a mean."""

    @property
    def tokens_per_step(self) -> int:
        return self.config.global_batch * self.sequence_length

    def loss(self, output: Tensor, batch: MicroBatch) -> Tensor:
        """This rank's part of the mean over all tokens of the global batch. `output`: logits (B, T,
        V), or losses (B, T) where the head computes them."""
        losses = output
        if output.ndim == 3:
            losses = token_losses(output.flatten(0, 1), batch.targets_bt.flatten(), self.z_loss)
        losses_bt = losses.view_as(batch.targets_bt)
        return (losses_bt.sum(1) * batch.weights_b).sum() / self.num_targets

    @property
    def z_loss(self) -> float:
        return 0.0

    def conclude(self) -> None:
        """Conclude after the last step."""


def run(job: TrainingJob, build: Callable[[session.Session], BaseTrainer]) -> None:
    """Trains until the last step."""
    mesh = job.spec.parallelism
    s = session.init(_shard_without_agent(job), mesh.tensor, mesh.context, mesh.pipeline_ranks)
    trainer = build(s)
    config = trainer.config
    model, scale = trainer.parallel.model, trainer.parallel.loss_scale
    start = s.restore(model, trainer.optimizer, scale, keep=trainer.keep)
    if s.rank == 0:
        print(_first_line(trainer, start), flush=True)
    began = printed = time.perf_counter()
    for step in s.steps(trainer.steps):
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
            tokens, total = trainer.tokens_per_step, trainer.steps
            flops = tokens * trainer.flops_per_token
            s.step(step, loss=loss, tokens=tokens, flops=flops, total_steps=total)
            interval = config.evaluate_every_steps
            if interval and (step + 1) % interval == 0:
                with s.phase("evaluate"):
                    validation_loss = evaluate(trainer)
                if s.rank == 0:
                    over = f"over {trainer.data.num_evaluated} samples"
                    print(f"step {step} validation loss {validation_loss:.4f} {over}", flush=True)
                began = printed = time.perf_counter()
    trainer.conclude()
    s.finish()
    session.leave()


def train_step(trainer: BaseTrainer, step: int) -> tuple[float, float]:
    """One optimizer step; returns (loss over the global batch, gradient norm)."""
    config, s, parallel = trainer.config, trainer.session, trainer.parallel
    s.seed(config.seed, step)
    part = share(step, config.global_batch, s.data_parallel_rank, s.data_parallel_size)
    end, first = trainer.data.end, step * config.global_batch
    trainer.num_targets = max(
        1, trainer.data.num_targets(range(first, min(first + config.global_batch, end)))
    )
    part = BatchShare(part.indices, tuple(
        weight if index < end else 0.0
        for index, weight in zip(part.indices, part.weights, strict=True)
    ))  # fmt: skip
    size = _samples_per_pass(config, s)
    batches = [_batch(trainer.data.batch, p) for p in micro_batches(part, size)]
    rate = learning_rate(config.optimizer, step, trainer.steps)
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


def _samples_per_pass(config: RecipeConfig, s: session.Session) -> int:
    part = share(0, config.global_batch, 0, s.shape.data_parallel_size)
    attached = worker_transport.attached
    chosen = attached.assign.membership.micro_batch if attached else 0
    return config.samples_per_pass(len(part.indices), s.shape.pipeline, chosen)


def micro_batches(part: BatchShare, size: int) -> list[BatchShare]:
    """Slices of a rank's share; the same number on every rank, since each one communicates."""
    return [
        BatchShare(part.indices[at : at + size], part.weights[at : at + size])
        for at in range(0, len(part.indices), size)
    ]


def evaluate(trainer: BaseTrainer) -> float:
    """Mean loss of the tokens of the validation samples, the same ones at every world size."""
    s, config, data = trainer.session, trainer.config, trainer.data
    part = share(0, data.num_evaluated, s.data_parallel_rank, s.data_parallel_size)
    trainer.num_targets = max(1, data.num_targets(range(data.num_evaluated), evaluation=True))
    # No larger than those of a training step, whose memory is known to suffice.
    size = _samples_per_pass(config, s)
    batches = [_batch(data.validation_batch, p) for p in micro_batches(part, size)]
    return float(trainer.parallel.evaluate(batches, trainer.loss))


def _batch(read: Callable[[tuple[int, ...]], Sequence[Tensor]], part: BatchShare) -> MicroBatch:
    inputs_bt, targets_bt, *positions = read(part.indices)
    return MicroBatch(inputs_bt, targets_bt, torch.tensor(part.weights), *positions)


def _shard_without_agent(job: TrainingJob) -> int | None:
    """The shard size of the spec, for a run without Holdfast, which has no membership. None: all
    ranks."""
    shard = job.spec.parallelism.shard
    return shard if isinstance(shard, int) else None


def main_without_agent(main: Callable[[TrainingJob], None]) -> None:
    """`torchrun ... -m holdfast.workers.training.recipes.NAME job.yaml`, without Holdfast."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m holdfast.workers.training.recipes.NAME JOB.yaml")
    try:
        main(load_job(sys.argv[1]))
    except HoldfastError as error:
        raise SystemExit(f"{error}") from None


def _first_line(trainer: BaseTrainer, start: int) -> str:
    config, s, data = trainer.config, trainer.session, trainer.data
    part = share(0, config.global_batch, 0, s.shape.data_parallel_size)
    passes = micro_batches(part, _samples_per_pass(config, s))
    tokens = f"{config.global_batch} x {trainer.sequence_length} tokens"
    return (
        f"{trainer.title}, {s.shape.strategy} {s.shape.describe()}, "
        f"{s.device.type}, global batch {tokens} in {s.shape.data_parallel_size} slices of "
        f"{len(passes)} x {len(passes[0].indices)}; {len(data.train)} samples an epoch, "
        f"{len(data.validation)} for validation; "
        f"steps {start} to {trainer.steps - 1}, generation {s.generation}"
    )

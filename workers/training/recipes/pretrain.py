"""The pre-training recipe: next-token prediction with a decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast import session
from holdfast.orchestrator.api.v1alpha1 import Pretrain, TrainingJob
from holdfast.orchestrator.api.v1alpha1.recipe import pretraining
from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.param_names import plain_name
from holdfast.workers.training import loop
from holdfast.workers.training.data import Dataset, MicroBatch
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.optimizers import make_optimizer
from holdfast.workers.training.parallel import Parallel, tensor
from holdfast.workers.training.parallel.pipeline import Pipeline

from ..models.transformer import Transformer, flops_per_token, num_parameters


@dataclass
class Trainer(loop.BaseTrainer):
    """The objects that a step needs."""

    config: Pretrain

    @property
    def z_loss(self) -> float:
        """0 in an evaluation."""
        return self.config.loss.z_loss if self.parallel.model.training else 0.0

    def head_arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """Arguments of the model if its head computes the losses."""
        size = self.config.loss.chunk_tokens
        if not size:
            return {}
        return {"targets_bt": batch.targets_bt, "chunk_tokens": size, "z_loss": self.z_loss}


def main(job: TrainingJob) -> None:
    """Trains until config.steps. Raises UserError for a spec without this recipe."""
    config = pretraining(job.spec.entrypoint.recipe)
    if config is None:
        raise UserError("spec.entrypoint.recipe: got another; expected the recipe pretrain")
    loop.run(job, lambda s: build(job, config, s))


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

    def initialise(module: nn.Module) -> None:
        """Values depend on (seed, name, position) only, so they are the same on any mesh."""
        for name, parameter in module.named_parameters() if not s.restoring else ():
            plain = plain_name(name)
            fill(parameter, config.seed, plain, model.standard_deviation(plain))

    parallel.materialize(initialise)
    optimizer = make_optimizer(config.optimizer, parallel.named_shards())
    if config.optimizer.in_backward:  # a later step finds no gradients
        groups = (block.parameters() for block in parallel.blocks)
        parallel.shards.step_in_backward(groups, optimizer.step)
    length = config.data.sequence_length
    trainer = Trainer(
        config,
        s,
        parallel,
        optimizer,
        Dataset(config, s.directory),
        steps=config.steps,
        sequence_length=length,
        flops_per_token=flops_per_token(config.model, length),
        title=f"pretrain: {num_parameters(config.model) / 1e6:.1f} M parameters",
    )
    parallel.arguments = trainer.head_arguments
    return trainer


if __name__ == "__main__":
    loop.main_without_agent(main)

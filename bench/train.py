"""The training script of every contestant: the same model, data, mesh and optimizer.

Owns: what is trained, and how each engine keeps its state: `holdfast` through workers.session,
`dcp` as PyTorch's documentation has it for torchrun (async_save on a group of
its own, dcp.load at start), `none` not at all. Must not: time anything but write down finished
steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.timeline import Recorder
from orchestrator.protocol.spec import Pretrain, job_from_mapping
from workers import session
from workers.recipes.pretrain import Trainer, build, train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["holdfast", "dcp", "none"], required=True)
    parser.add_argument("--timeline", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--shard", type=int, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    s = session.init(shard=options.shard)
    trainer = build_trainer(s, options.steps)
    keeper = Dcp(trainer, options.checkpoints) if options.engine == "dcp" else None
    if keeper:
        start = keeper.load()
    elif options.engine == "holdfast":
        start = s.restore(trainer.parallel.model, trainer.optimizer)
    else:
        start = 0
    recorder = Recorder(options.timeline)
    for step in range(start, options.steps):
        loss, _norm = train_step(trainer, step)
        if options.engine == "holdfast":
            s.step(step, loss=loss, tokens=trainer.tokens_per_step)
        recorder.finished(step)
        if keeper and (step + 1) % options.save_every == 0:
            keeper.save(step)
    s.finish()


def build_trainer(s: session.Session, steps: int) -> Trainer:
    """3.3 M parameters: dim 256, 4 layers, sequence 128, global batch 8."""
    recipe = {"name": "pretrain", "config": {"steps": steps}}
    job = job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "bench"},
            "spec": {"entrypoint": {"recipe": recipe}},
        }
    )
    return build(job, Pretrain(steps=steps), s)


class Dcp:
    """Distributed checkpoints as a careful user of torchrun would write them."""

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self._model, self._optimizer = trainer.parallel.model, trainer.optimizer
        self._directory = directory
        self._group = dist.new_group(backend="gloo")
        self._pending: Any = None

    def load(self) -> int:
        """The step to go on with; 0 where nothing was saved."""
        done = sorted(self._directory.glob("step-*/.metadata"))
        if not done:
            return 0
        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=str(done[-1].parent))
        set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        return int(done[-1].parent.name.removeprefix("step-")) + 1

    def save(self, step: int) -> None:
        if self._pending is not None:
            self._pending.result()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        self._pending = dcp.async_save(
            {"model": model, "optim": optimizer},
            checkpoint_id=str(self._directory / f"step-{step:06d}"),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )


if __name__ == "__main__":
    main()

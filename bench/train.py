"""The training script of every contestant: the same model, data, mesh and optimizer.

Engines differ in how they keep state: `holdfast` uses holdfast.session; `shards` also uses
`session.shards` for the optimizer; `kept` also attempts, so that survivors keep their process;
`dcp` follows PyTorch's documentation for torchrun (async_save on its own group, dcp.load at the
start); `none` keeps no state. It only records finished steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from bench.gpu import faults, sharing
from bench.timeline import Recorder
from holdfast import session
from holdfast.orchestrator.api.v1alpha1 import Pretrain
from holdfast.workers.session.order import share
from holdfast.workers.training.data import Dataset
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.models.transformer import Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--engine", choices=["holdfast", "shards", "kept", "dcp", "none"], required=True
    )
    parser.add_argument("--timeline", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--shard", required=True, help="a number of ranks, or world")
    parser.add_argument("--config", default="{}", help="JSON, settings of the recipe")
    parser.add_argument("--dtype", default="float32", help="of parameters and moments")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    recorder = Recorder(options.timeline)
    torch.set_num_threads(1)
    sharing.share_one_gpu()
    if torch.cuda.is_available():
        torch.zeros(1, device=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    recorder.mark("context")
    s = session.init(shard=None if options.shard == "world" else int(options.shard))
    if dist.is_initialized() and options.engine != "kept":
        dist.all_reduce(torch.zeros(1, device=s.device))
    recorder.mark("process group")
    ours = options.engine in ("holdfast", "shards", "kept")
    fresh = not s.restoring and not Dcp.saved(options.checkpoints)
    config = Pretrain(steps=options.steps, **json.loads(options.config))
    dtype = getattr(torch, options.dtype)
    trainer = Trainer(s, config, fresh, local=options.engine in ("shards", "kept"), dtype=dtype)
    if options.compile:
        for block in trainer.model.blocks:
            block.compile()
    recorder.mark("model")
    keeper = Dcp(trainer, options.checkpoints) if options.engine == "dcp" else None
    if keeper:
        start = keeper.load()
    elif ours:
        start = s.restore(trainer.model, trainer.optimizer)
    else:
        start = 0
    recorder.mark("restore")
    if options.engine == "kept":
        attempt(s, trainer, options.steps, recorder, options.timeline)
        start = options.steps
    for step in range(start, options.steps):
        faults.happen(Path(options.timeline).parent, s.rank, s.device)
        loss = trainer.step(step)
        if ours:
            s.step(step, loss=loss, tokens=trainer.tokens)
        recorder.finished(step)
        if keeper and (step + 1) % options.save_every == 0:
            keeper.save(step)
    s.finish()


def attempt(
    s: session.Session, trainer: Trainer, steps: int, recorder: Recorder, timeline: str
) -> None:
    """The loop of attempts. A generation of a kept process has step files of its own."""
    generation = s.generation
    for step in s.steps(steps):
        with s.attempt():
            if s.generation != generation:
                recorder, generation = Recorder(timeline), s.generation
            faults.happen(Path(timeline).parent, s.rank, s.device)
            s.step(step, loss=trainer.step(step), tokens=trainer.tokens)
            recorder.finished(step)


class Trainer:
    """A training loop as many people write it: FSDP2 per block, AdamW over the sharded parameters,
    gradients clipped to norm 1. By default 3.3 M parameters: dim 256, 4 layers, sequence 128, batch
    8."""

    def __init__(
        self,
        s: session.Session,
        config: Pretrain,
        fresh: bool,
        local: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`fresh`: no state will be restored, so first values are needed. `local`: the optimizer
        works on this rank's own parts instead of DTensors."""
        self.config = config
        self.session = s
        with torch.device("meta"):
            self.model = Transformer(self.config.model).to(dtype)
        for part in [*self.model.blocks, self.model.embedding, [self.model.norm, self.model.head]]:
            fully_shard(part, mesh=s.fsdp_mesh)
        fully_shard(self.model, mesh=s.fsdp_mesh)
        self.model.to_empty(device=s.device)
        for name, parameter in self.model.named_parameters() if fresh else ():
            fill(parameter, 0, name, self.model.standard_deviation(name))
        self.shards = s.shards(self.model) if local else None
        source = self.shards or self.model
        self.optimizer = torch.optim.AdamW(source.parameters(), lr=1e-3)
        self.data = Dataset(self.config, ".")
        self.tokens = self.config.global_batch * self.config.data.sequence_length

    def step(self, step: int) -> float:
        s = self.session
        part = share(step, self.config.global_batch, s.data_parallel_rank, s.data_parallel_size)
        inputs_bt, targets_bt = (ids.to(s.device) for ids in self.data.batch(part.indices))
        logits_btv = self.model(inputs_bt)
        loss = F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())
        loss.backward()
        if self.shards is not None:
            self.shards.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Dcp:
    """Distributed checkpoints as a careful user of torchrun would write them."""

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self._model, self._optimizer = trainer.model, trainer.optimizer
        self._directory = directory
        self._group = dist.new_group(backend="gloo")
        self._pending: Any = None

    @staticmethod
    def saved(directory: Path) -> list[Path]:
        """Marks of complete checkpoints, oldest first."""
        return sorted(directory.glob("step-*/.metadata"))

    def load(self) -> int:
        """The step to go on with; 0 where nothing was saved."""
        done = self.saved(self._directory)
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
        if dist.get_rank() == 0:  # on a disk that holds a few checkpoints of a large model
            for old in self.saved(self._directory)[:-2]:
                shutil.rmtree(old.parent)
        model, optimizer = get_state_dict(self._model, self._optimizer)
        self._pending = dcp.async_save(
            {"model": model, "optim": optimizer},
            checkpoint_id=str(self._directory / f"step-{step:06d}"),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )


if __name__ == "__main__":
    main()

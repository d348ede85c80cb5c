"""The training script of bench/soak.py: a small FSDP2 model, trained until a file says the last
step. The same steps give the same bits at a fixed world, whatever happens in between.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.fsdp import fully_shard

from holdfast import session
from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.workers.session.order import share
from holdfast.workers.training.initial_values import fill
from holdfast.workers.training.models.transformer import Transformer

CONFIG = Model(dim=32, num_layers=1, num_heads=2)
BATCH, LENGTH = 4, 16


def main(stop_file: Path, progress: Path, pause_s: float) -> None:
    """Each rank writes its newest step to a file in `progress`."""
    torch.set_num_threads(1)
    s = session.init()
    newest = os.open(progress / str(s.rank), os.O_WRONLY | os.O_CREAT)
    with torch.device("meta"):
        model = Transformer(CONFIG)
    for part in [*model.blocks, model.embedding, [model.norm, model.head]]:
        fully_shard(part, mesh=s.fsdp_mesh)
    fully_shard(model, mesh=s.fsdp_mesh)
    model.to_empty(device=s.device)
    for name, parameter in model.named_parameters():
        fill(parameter, 0, name, model.standard_deviation(name))
    shards = s.shards(model)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=1e-3)
    step = s.restore(model, optimizer)
    while step < last_step(stop_file):
        part = share(step, BATCH, s.data_parallel_rank, s.data_parallel_size)
        tokens = torch.stack([sample(index) for index in part.indices])
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        shards.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        s.step(step, loss=float(loss.detach()))
        os.pwrite(newest, b"%12d" % step, 0)
        step += 1
        time.sleep(pause_s)
    s.finish()


def sample(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, CONFIG.vocab_size, (LENGTH + 1,), generator=generator)


def last_step(stop_file: Path) -> float:
    """The number of steps; it is written long before a rank reaches it."""
    try:
        return int(stop_file.read_text())
    except FileNotFoundError:
        return float("inf")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))

"""A training loop of one's own on a tensor axis: prints loss and gradient norm of each step.

Outside Holdfast the environment says how large the axis is; the rest of the ranks shard.
"""

from __future__ import annotations

import os
import time

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast import session

VOCABULARY, DIM, WIDTH, BATCH, LENGTH = 64, 32, 128, 4, 16
STEPS, STEP_S = int(os.environ.get("STEPS", "5")), float(os.environ.get("STEP_S", "0"))


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))): (B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, DIM)

    def forward(self, x_btd: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(self.norm(x_btd))))
        return x_btd + added


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
"""`up` is divided by its outputs and `down` by its inputs: one all-reduce in each block."""


def main() -> None:
    s = session.init(tensor=int(os.environ.get("TENSOR", "1")))
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, DIM), Block(), Block(), nn.Linear(DIM, VOCABULARY)
    )
    model.to(s.device)
    if s.shape.tensor > 1:
        for block in (model[1], model[2]):
            parallelize_module(block, s.mesh["tensor"], PLAN)
    if s.world_size > 1:
        fully_shard(model, mesh=s.fsdp_mesh)
    shards = s.shards(model)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=0.01)
    for step in range(s.restore(model, optimizer), STEPS):
        torch.manual_seed(step)
        whole_bt = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to(s.device)
        mine_bt = whole_bt.chunk(s.data_parallel_size)[s.data_parallel_rank]  # one for the axis
        logits_btv = model(mine_bt[:, :-1])
        losses = F.cross_entropy(logits_btv.mT, mine_bt[:, 1:], reduction="sum")
        loss = losses / (BATCH * LENGTH)
        (loss * s.data_parallel_size).backward()  # fully_shard averages over these ranks
        # Ranks of the tensor axis have the same loss.
        total, norm = shards.reduce_and_clip(loss / s.shape.tensor, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        s.step(step, loss=total)
        if s.rank == 0:
            print(f"step {step} loss {total:.4f} norm {norm:.3f}", flush=True)
        time.sleep(STEP_S)
    s.finish()
    session.leave()


if __name__ == "__main__":
    main()

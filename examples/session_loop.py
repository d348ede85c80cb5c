"""Your own training loop with fast recovery: six lines of `holdfast.session`.

holdfast run examples/session.yaml      # recovers in a second, loses no finished step
torchrun --nproc-per-node 2 examples/session_loop.py    # the same script, without recovery

The model learns the parity of bits, which needs no data.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast import session

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
BITS, BATCH = 8, 64


def main() -> None:
    s = session.init()  # device, process groups, mesh, connection to the agent
    torch.manual_seed(0)  # every rank starts with the same values
    model = nn.Sequential(nn.Linear(BITS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                          nn.Linear(256, 1)).to(s.device)  # fmt: skip
    if s.world_size > 1:
        for layer in (*model[::2], model):  # each linear layer, then what is left
            fully_shard(layer, mesh=s.fsdp_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    totals = {"samples": 0}  # JSON values, stored with the checkpoint

    for step in range(s.restore(model, optimizer, totals), STEPS):
        s.seed(1234, step)  # the same random numbers if this step is repeated
        bits = torch.randint(0, 2, (BATCH, BITS), device=s.device).float()
        parity = bits.sum(1) % 2
        loss = nn.functional.binary_cross_entropy_with_logits(model(bits).squeeze(1), parity)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        totals["samples"] += BATCH * s.data_parallel_size
        s.step(step, loss=loss.detach(), total_steps=STEPS)  # stages the state in memory, reports
        if s.rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} samples {totals['samples']}", flush=True)

    s.finish()
    session.leave()


if __name__ == "__main__":
    main()

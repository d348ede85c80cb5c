"""A training loop of one's own on a context axis: prints loss and gradient norm of each step."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from holdfast import session

VOCABULARY, DIM, HEADS, BATCH, LENGTH, STEPS = 64, 32, 4, 2, 16, 5


class Model(nn.Module):
    """One layer of causal attention with learned positions: (B, T) -> (B, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.inner = nn.Linear(DIM, 3 * DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens_bt: Tensor, positions_t: Tensor) -> Tensor:
        x_btd = self.tokens(tokens_bt) + self.positions(positions_t)
        heads = self.inner(x_btd).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.head(x_btd + mixed.transpose(1, 2).flatten(2))
        return logits


def main() -> None:
    s = session.init(shard=1, context=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(1)
    model = Model().to(s.device)
    if s.world_size > 1:
        fully_shard(model, mesh=s.fsdp_mesh)
    shards = s.shards(model)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=0.01)
    for step in range(s.restore(model, optimizer), STEPS):
        torch.manual_seed(step)
        whole_bt = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to(s.device)
        inputs_bt, targets_bt = whole_bt[:, :-1], whole_bt[:, 1:]
        with s.context_parallel(inputs_bt, targets_bt) as (inputs_bt, targets_bt, positions_t):
            with torch.autocast("cuda", torch.bfloat16, enabled=s.device.type == "cuda"):
                logits_btv = model(inputs_bt, positions_t)
            losses = F.cross_entropy(logits_btv.float().mT, targets_bt, reduction="sum")
            loss = losses / (BATCH * LENGTH)
            (loss * s.world_size).backward()  # FSDP2 averages over the ranks
        total, norm = shards.reduce_and_clip(loss, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        s.step(step, loss=total)
        if s.rank == 0:
            print(f"step {step} loss {total:.4f} norm {norm:.3f}", flush=True)
    s.finish()
    session.leave()


if __name__ == "__main__":
    main()

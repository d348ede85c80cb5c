"""A training loop of one's own on a pipeline axis: prints loss and gradient norm of each step.

Outside Holdfast the environment says how many stages there are.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from holdfast import session

VOCABULARY, DIM, LAYERS, BATCH, LENGTH, MICRO_BATCHES, STEPS = 64, 32, 6, 8, 16, 4, 5


class Residual(nn.Module):
    """x + gelu(linear(x)): (B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd + F.gelu(self.linear(x_btd))


class Part(nn.Module):
    """Consecutive layers, under the names that they have in the whole model."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(1)  # every rank makes all layers, and keeps its own
        middle = [Residual() for _ in range(LAYERS - 2)]
        whole = [nn.Embedding(VOCABULARY, DIM), *middle, nn.Linear(DIM, VOCABULARY)]
        here = range(LAYERS * stage // num_stages, LAYERS * (stage + 1) // num_stages)
        self.layers = nn.ModuleDict({str(number): whole[number] for number in here})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    return F.cross_entropy(logits_btv.mT, targets_bt)


def main() -> None:
    s = session.init(pipeline=int(os.environ.get("PIPELINE", "1")))
    stage, num_stages, schedule = 0, s.shape.pipeline, None
    if num_stages > 1:
        axis = s.mesh["pipeline"]
        stage = axis.get_local_rank()
    model = Part(stage, num_stages).to(s.device)
    if num_stages > 1:
        part = PipelineStage(model, stage, num_stages, s.device, group=axis.get_group())
        schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=loss_of)
    shards = s.shards(model)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=0.01)
    for step in range(s.restore(model, optimizer), STEPS):
        torch.manual_seed(step)
        whole_bt = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to(s.device)
        inputs_bt, targets_bt = whole_bt[:, :-1], whole_bt[:, 1:]
        loss = torch.zeros((), device=s.device)  # on ranks without the last stage
        if schedule is None:
            loss = loss_of(model(inputs_bt), targets_bt)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            losses: list[Tensor] = []
            given = (inputs_bt,) if stage == 0 else ()
            is_last = stage == num_stages - 1
            target_bt, collected = (targets_bt, losses) if is_last else (None, None)
            schedule.step(*given, target=target_bt, losses=collected)
            if losses:
                loss = torch.stack(losses).mean()
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

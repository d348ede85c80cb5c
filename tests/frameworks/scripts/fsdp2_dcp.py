"""fully_shard with a directory per checkpoint, the newest loaded, as in torch's example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import steplog
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCABULARY, LENGTH, BATCH = 256, 64, 4


class AppState(Stateful):
    """State of a checkpoint: model, optimizer, step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def build() -> nn.Module:
    layer = lambda: nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 128), layer(), layer(), nn.Linear(128, VOCABULARY)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in list(model)[1:3]:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def latest(directory: Path) -> Path | None:
    found = sorted(directory.glob("step-*"))
    return found[-1] if found else None


def main() -> None:
    options = steplog.parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = build()
    state = AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = latest(options.out)
    dist.barrier()
    if found is not None:
        dcp.load({"app": state}, checkpoint_id=found)
    while state.step < options.steps:
        generator = torch.Generator().manual_seed(state.step * 1000 + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        steplog.finished(state.step, loss.item())
        if state.step % options.save_every == 0:
            dcp.save({"app": state}, checkpoint_id=options.out / f"step-{state.step:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

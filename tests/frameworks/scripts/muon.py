"""torch.optim.Muon for the matrices of the blocks, AdamW for the rest, DistributedDataParallel.

A checkpoint is written beside and renamed, so it exists as a whole or not at all.
"""

from __future__ import annotations

import steplog
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH, BATCH = 256, 64, 4


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon is for matrices between hidden layers only."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and name[0] in "12"]
    ids = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.Muon(hidden, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]


def main() -> None:
    options = steplog.parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    layer = lambda: nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 128), layer(), layer(), nn.Linear(128, VOCABULARY)
    )
    both = optimizers(model)
    path, step = options.out / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, map_location="cpu")
        model.load_state_dict(state["model"])
        for one, saved in zip(both, state["optimizers"], strict=True):
            one.load_state_dict(saved)
        step = state["step"]
    parallel = DistributedDataParallel(model)
    while step < options.steps:
        generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        logits = parallel(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for one in both:
            one.step()
            one.zero_grad()
        step += 1
        steplog.finished(step, loss.item())
        if step % options.save_every == 0 and dist.get_rank() == 0:
            partial = path.with_suffix(".partial")
            states = [one.state_dict() for one in both]
            torch.save({"model": model.state_dict(), "optimizers": states, "step": step}, partial)
            partial.replace(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

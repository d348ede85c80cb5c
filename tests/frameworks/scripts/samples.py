"""transformers.Trainer, or an accelerate loop with skip_first_batches, over numbered samples. The
model adds up what it has trained on, so its last checkpoint has how often each sample counted in
each epoch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import steplog
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

SAMPLES, BATCH, EPOCHS = 96, 4, 3


class Numbers(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"ids": index}


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(EPOCHS, SAMPLES))
        self.register_buffer("order", torch.full((EPOCHS, SAMPLES // BATCH), -1.0))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        everywhere = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, ids)
        ranks = torch.cat(everywhere)
        epoch, step = divmod(int(self.steps), SAMPLES // BATCH // len(everywhere))
        self.seen[epoch, ranks] += 1
        self.order[epoch, step] = ranks[0]
        self.steps += 1
        return {"loss": self.weight.square().sum()}


class StepLog(TrainerCallback):
    """Callback that only writes the step log."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steplog.finished(state.global_step)


def by_trainer(model: Counts, out: Path, save_every: int) -> None:
    arguments = TrainingArguments(
        output_dir=str(out), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
        save_strategy="steps", save_steps=save_every, logging_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, ddp_backend="gloo", remove_unused_columns=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[StepLog()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)) if out.is_dir() else None)


def by_loop(model: Counts, out: Path, save_every: int) -> None:
    # Otherwise accelerate draws another order for the rest of the epoch than for its beginning.
    seeded = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seeded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbers(), BATCH, shuffle=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    if saved := sorted(out.glob("step-*")):
        accelerator.load_state(str(saved[-1]))
        done = int(saved[-1].name.removeprefix("step-"))
    first, skipped = divmod(done, len(loader))
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, skipped if epoch == first else 0)
        for batch in rest:
            accelerator.backward(wrapped(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            steplog.finished(done)
            if done % save_every == 0:
                accelerator.save_state(str(out / f"step-{done:06d}"))


LOOPS: dict[str, Callable[[Counts, Path, int], None]] = {"trainer": by_trainer, "loop": by_loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--loop", choices=LOOPS, required=True)
    options = parser.parse_args()
    set_seed(0)
    model = Counts()
    LOOPS[options.loop](model, options.out, options.save_every)
    if dist.get_rank() == 0:
        torch.save({"seen": model.seen, "order": model.order}, options.out / "counts.pt")


if __name__ == "__main__":
    main()

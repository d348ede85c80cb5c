"""What a function of `holdfast.ray.Trainer` calls in its workers, with the names of Ray Train:
report, get_checkpoint, get_context, prepare_model, prepare_data_loader.
The directory of a run is described in protocol/run_directory.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.protocol import files, run_directory
from holdfast.orchestrator.protocol.run_directory import TrainCheckpoint, facts_file
from holdfast.workers.session import reporting

_PARTIAL = ".partial-"


@dataclass
class _Run:
    """Of this process."""

    path: Path
    name: str
    num_to_keep: int | None
    device: torch.device
    number: int
    """Of the next checkpoint."""
    reports: int
    """Before the next one, counted over restarts from the checkpoint."""


_runs: list[_Run] = []
"""At most one."""


def begin(path: str, name: str, num_to_keep: int | None = None) -> None:
    """Make this process a worker of a run, in a process group with the others: NCCL where it has a
    GPU, gloo elsewhere. `path`: the directory of the run, which all workers see."""
    run = Path(path)
    run.mkdir(parents=True, exist_ok=True)
    if int(os.environ["RANK"]) == 0:  # before the others can write: they wait in the group below
        for rest in run.glob(f"{_PARTIAL}*"):
            shutil.rmtree(rest, ignore_errors=True)
    found = run_directory.checkpoints(run)
    number = run_directory.number(found[-1]) + 1 if found else 0
    reports = int(json.loads(facts_file(found[-1]).read_text())["reports"]) if found else 0
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    _runs.append(_Run(run, name, num_to_keep, device, number, reports))
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timedelta(minutes=30))


def _run(name: str) -> _Run:
    if not _runs:
        expected = "it in the function of a holdfast.ray.Trainer"
        raise UserError(str(Problem(f"holdfast.ray.{name}", "a call", expected)))
    return _runs[0]


def report(
    metrics: Mapping[str, Any],
    checkpoint: TrainCheckpoint | None = None,
    checkpoint_dir_name: str | None = None,
) -> None:
    """Report metrics, and keep a checkpoint. All ranks call it equally often; it waits for all.

    The directories that ranks hand in become one directory below storage_path. It is complete, and
    what `get_checkpoint` returns after a restart, when `report` returns; before, the checkpoint
    before it is. Metrics are rank 0's: what JSON can hold, and numbers of numpy and torch. The
    loss that Holdfast shows is `metrics["loss"]`. Raises UserError for `checkpoint_dir_name`.
    """
    run = _run("report")
    if checkpoint_dir_name is not None:
        expected = "nothing: checkpoints are numbered"
        raise UserError(str(Problem("checkpoint_dir_name", checkpoint_dir_name, expected)))
    rank, name = dist.get_rank(), f"checkpoint_{run.number:06}"
    partial = run.path / f"{_PARTIAL}{name}"
    with reporting.phase("save"):
        if checkpoint is not None:
            shutil.copytree(checkpoint.path, partial, dirs_exist_ok=True)
            _sync(partial)
        kept = _any(checkpoint is not None, run.device)
        run.reports += 1
        facts = {"reports": run.reports, "metrics": metrics}
        if rank == 0:
            text = json.dumps(facts, default=_plain).encode()
            if kept:
                files.replace(facts_file(run.path / name), text)
                partial.rename(run.path / name)
                files.sync_directory(run.path)
                _delete_old(run)
            files.replace(run.path / run_directory.RESULT, text)
        if kept:
            _any(True, run.device)  # no rank goes on before the checkpoint is complete
            run.number += 1
    loss = metrics.get("loss")
    reporting.report(run.reports - 1, loss=float(loss) if rank == 0 and loss is not None else None)


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        if not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _any(value: bool, device: torch.device) -> bool:
    """Whether it is true on any rank. Waits for all."""
    found = torch.tensor(int(value), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def _delete_old(run: _Run) -> None:
    if run.num_to_keep is not None:
        for old in run_directory.checkpoints(run.path)[: -run.num_to_keep]:
            shutil.rmtree(old, ignore_errors=True)
            facts_file(old).unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """A number of numpy or torch; the text of everything else."""
    return value.item() if hasattr(value, "item") else str(value)


def get_checkpoint() -> TrainCheckpoint | None:
    """The newest checkpoint of the run, from which to go on; None: there is none yet."""
    return run_directory.newest(_run("get_checkpoint").path)


class TrainContext:
    """Ranks and sizes of this process; `get_context()`. A node is a node of the job."""

    def get_world_rank(self) -> int:
        return int(os.environ["RANK"])

    def get_world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def get_local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def get_local_world_size(self) -> int:
        return int(os.environ["LOCAL_WORLD_SIZE"])

    def get_node_rank(self) -> int:
        return int(os.environ["GROUP_RANK"])

    def get_experiment_name(self) -> str:
        return _run("get_context").name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("get_"):
            got, expected = f"get_context().{name}()", "one of the ranks, sizes and the name"
            raise UserError(str(Problem("holdfast.ray", got, expected)))
        raise AttributeError(name)


def get_context() -> TrainContext:
    """In the function of a Trainer. Raises UserError elsewhere."""
    _run("get_context")
    return TrainContext()


def get_device() -> torch.device:
    """The device of this process."""
    return _run("get_device").device


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
) -> nn.Module:
    """Move the model to the device of this process, and wrap it in DistributedDataParallel where
    there is more than one worker. `parallel_strategy`: ddp or None; call `fully_shard` yourself for
    FSDP2. Raises UserError for another one."""
    run = _run("prepare_model")
    if parallel_strategy not in ("ddp", None):
        fix = "call torch.distributed.fsdp.fully_shard on the model"
        problem = Problem("parallel_strategy", parallel_strategy, "ddp or None", fix)
        raise UserError(str(problem))
    if move_to_device:
        model = model.to(run.device if move_to_device is True else move_to_device)
    if parallel_strategy is None or dist.get_world_size() == 1:
        return model
    ids = [run.device] if run.device.type == "cuda" else None
    options = {"device_ids": ids, **(parallel_strategy_kwargs or {})}
    return nn.parallel.DistributedDataParallel(model, **options)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> Any:
    """The loader with a DistributedSampler, shuffled if the loader was, whose batches are moved to
    the device of this process. Call `loader.sampler.set_epoch(epoch)` as with Ray Train.
    `auto_transfer` changes nothing: copies to a GPU do not wait for it."""
    run = _run("prepare_data_loader")
    if add_dist_sampler and dist.get_world_size() > 1:
        sampler: DistributedSampler[Any] = DistributedSampler(
            data_loader.dataset, shuffle=isinstance(data_loader.sampler, RandomSampler)
        )
        data_loader = DataLoader(
            data_loader.dataset, batch_size=data_loader.batch_size, sampler=sampler,
            num_workers=data_loader.num_workers, collate_fn=data_loader.collate_fn,
            pin_memory=data_loader.pin_memory, drop_last=data_loader.drop_last,
            timeout=data_loader.timeout, worker_init_fn=data_loader.worker_init_fn,
        )  # fmt: skip
    return _OnDevice(data_loader, run.device) if move_to_device else data_loader


class _OnDevice:
    """A loader whose batches are on a device; everything else is the loader's."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __iter__(self) -> Iterator[Any]:
        return (_moved(batch, self._device) for batch in self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _moved(part, device) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)([_moved(part, device) for part in batch])
    return batch

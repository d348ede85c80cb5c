"""Functions for the workers of a `holdfast.ray.Trainer`, with the names of Ray Train: report,
get_checkpoint, get_context, prepare_model, prepare_data_loader. The directory of a run is described
in protocol/run_directory.py."""

from __future__ import annotations

import copy
import enum
import functools
import json
import os
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import files, run_directory
from holdfast.orchestrator.protocol.run_directory import TrainCheckpoint, facts_file
from holdfast.workers.session import reporting

_PARTIAL = ".partial-"
_SHARED = ".shared-"
_SHARED_S = 10.0
"""A file that rank 0 wrote is looked for so long: some network file systems show it late."""


@dataclass
class _Run:
    """The run of this process."""

    path: Path
    name: str
    num_to_keep: int | None
    device: torch.device
    number: int
    """Number of the next checkpoint."""
    reports: int
    """Reports before the next one, counted over restarts from the checkpoint."""


_runs: list[_Run] = []
"""Runs of this process, at most one."""


def begin(
    path: str,
    name: str,
    num_to_keep: int | None = None,
    backend: str | None = None,
    timeout_s: float = 1800,
) -> None:
    """Make this process a worker of a run, in a process group with the others: by default NCCL
    where it has a GPU, gloo elsewhere. `path`: the directory of the run. Raises UserError in all
    ranks where one of them does not see it."""
    run, mark = Path(path), f"{_SHARED}{secrets.token_hex(8)}"
    if int(os.environ["RANK"]) == 0:  # before the others can write: they wait in the group below
        run.mkdir(parents=True, exist_ok=True)
        for rest in [*run.glob(f"{_PARTIAL}*"), *run.glob(f"{_SHARED}*")]:
            shutil.rmtree(rest, ignore_errors=True)
        (run / mark).mkdir()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    chosen = backend or ("nccl" if has_gpu else "gloo")
    dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s))
    _expect_shared(run, mark)
    saved = run_directory.checkpoints(run)
    number = run_directory.number(saved[-1]) + 1 if saved else 0
    reports = int(json.loads(facts_file(saved[-1]).read_text())["reports"]) if saved else 0
    _runs.append(_Run(run, name, num_to_keep, device, number, reports))


def _expect_shared(run: Path, mark: str) -> None:
    """Raise UserError in all ranks if one does not see what rank 0 has made in the directory: it
    would begin without the checkpoint that the others have. Waits for all."""
    marks = [mark]
    dist.broadcast_object_list(marks)
    give_up = time.monotonic() + _SHARED_S
    while not (seen := (run / marks[0]).exists()) and time.monotonic() < give_up:
        time.sleep(0.1)
    ranks: list[tuple[bool, str]] = [(seen, "")] * dist.get_world_size()
    dist.all_gather_object(ranks, (seen, socket.gethostname()))
    if dist.get_rank() == 0:
        (run / mark).rmdir()
    if blind := [f"{rank} on {host}" for rank, (sees, host) in enumerate(ranks) if not sees]:
        got = (
            f"{run}, in which rank 0 on {ranks[0][1]} has written and rank {blind[0]} sees nothing"
        )
        fix = "set RunConfig(storage_path=...) to a directory of a network file system"
        raise UserError.of("storage_path", got, "a directory that all nodes share", fix)


def keep_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which rank 0 writes what it returns, for `Result.return_value`."""

    @functools.wraps(function)
    def keeping(*args: Any) -> None:
        returned = function(*args)
        if dist.get_rank() == 0:
            run_directory.write_returned(_run("Trainer").path, returned)

    return keeping


def _run(name: str) -> _Run:
    if not _runs:
        expected = "it in the function of a holdfast.ray.Trainer"
        raise UserError.of(f"holdfast.ray.{name}", "a call", expected)
    return _runs[0]


class CheckpointUploadMode(enum.Enum):
    """Ways in which `report` keeps a checkpoint. Only SYNC is supported."""

    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


def report(
    metrics: Mapping[str, Any],
    checkpoint: TrainCheckpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Any = None,
    validation: Any = False,
) -> None:
    """Report metrics, and keep a checkpoint. All ranks call it equally often; it waits for all.

    The directories that ranks hand in become one directory below storage_path. It is complete, and
    what `get_checkpoint` returns after a restart, when `report` returns; before, the checkpoint
    before it is. Metrics are rank 0's: what JSON can hold, and numbers of numpy and torch. The
    loss that Holdfast shows is `metrics["loss"]`. Raises UserError for the other parameters, but
    for the values that mean what it does.
    """
    run = _run("report")
    mode = getattr(checkpoint_upload_mode, "name", checkpoint_upload_mode)  # also of Ray's enum
    _refuse("checkpoint_dir_name", checkpoint_dir_name, "nothing: checkpoints are numbered")
    _refuse("checkpoint_upload_mode", mode if mode != "SYNC" else None, "CheckpointUploadMode.SYNC")
    fix = "False or None; delete the directory when report has returned"
    _refuse("delete_local_checkpoint_after_upload", delete_local_checkpoint_after_upload, fix)
    expected = "nothing: directories are copied to storage_path"
    _refuse("checkpoint_upload_fn", checkpoint_upload_fn, expected)
    _refuse("validation", validation, "False; validate in the function, and report the result")
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
            _any(True, run.device)  # no rank continues before the checkpoint is complete
            run.number += 1
    loss = metrics.get("loss")
    reporting.report(run.reports - 1, loss=float(loss) if rank == 0 and loss is not None else None)


def _refuse(field: str, got: object, expected: str) -> None:
    """Raise UserError if something was given."""
    if got is not None and got is not False:
        raise UserError.of(field, str(got)[:80], expected)


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        if not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _any(value: bool, device: torch.device) -> bool:
    """True if `value` is true on any rank. Waits for all."""
    flag = torch.tensor(int(value), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _delete_old(run: _Run) -> None:
    if run.num_to_keep is not None:
        for old in run_directory.checkpoints(run.path)[: -run.num_to_keep]:
            shutil.rmtree(old, ignore_errors=True)
            facts_file(old).unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """A number of numpy or torch; the text of everything else."""
    return value.item() if hasattr(value, "item") else str(value)


def get_checkpoint() -> TrainCheckpoint | None:
    """The newest checkpoint of the run, to resume from; None: there is none yet."""
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
            raise UserError.of("holdfast.ray", got, expected)
        raise AttributeError(name)


def get_context() -> TrainContext:
    """The context of a Trainer's function. Raises UserError elsewhere."""
    _run("get_context")
    return TrainContext()


def get_device() -> torch.device:
    """The device of this process."""
    return _run("get_device").device


def get_devices() -> list[torch.device]:
    """The device of this process; it has one."""
    return [get_device()]


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
        raise UserError.of("parallel_strategy", parallel_strategy, "ddp or None", fix)
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

    With one worker, an IterableDataset or a DistributedSampler of its own the loader keeps its
    samples. Another sampler is replaced with a warning, as Ray Train does; a batch_sampler is
    refused with UserError. `auto_transfer` changes nothing: copies to a GPU do not wait for it."""
    run = _run("prepare_data_loader")
    if add_dist_sampler and dist.get_world_size() > 1 and not _has_own_part(data_loader):
        data_loader = _with_part(data_loader)
    return _OnDevice(data_loader, run.device) if move_to_device else data_loader


def _has_own_part(loader: DataLoader[Any]) -> bool:
    """True if the sampler itself decides which samples this rank has."""
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    distributed = any(isinstance(sampler, DistributedSampler) for sampler in samplers)
    return distributed or isinstance(loader.dataset, IterableDataset)


def _with_part(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader with the samples of this rank. A copy, so that it keeps its class and all other
    settings, also those that a newer torch adds."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        fix = "pass add_dist_sampler=False if it has only the samples of its rank"
        expected = "batch_size, and a sampler or shuffle"
        got = type(loader.batch_sampler).__name__
        raise UserError.of("data_loader.batch_sampler", got, expected, fix)
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    if shuffle and not _is_plain_shuffle(loader.sampler) and dist.get_rank() == 0:
        warnings.warn(
            f"prepare_data_loader replaces the {type(loader.sampler).__name__} of the loader with a"
            " DistributedSampler that shuffles. To keep it, pass add_dist_sampler=False and give"
            " each rank samples of its own.",
            stacklevel=3,
        )
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, shuffle=shuffle)
    size = loader.batch_size
    batches = None if size is None else BatchSampler(sampler, size, loader.drop_last)
    divided = copy.copy(loader)
    # A DataLoader refuses the assignment. _iterator: persistent workers are those of the old one.
    vars(divided).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return divided


def _is_plain_shuffle(sampler: object) -> bool:
    """True if `shuffle=True` made the sampler: each sample once."""
    if type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


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
    if isinstance(batch, (torch.Tensor, PackedSequence)):
        return batch.to(device, non_blocking=True)  # type: ignore[arg-type] # of PackedSequence
    if isinstance(batch, Mapping):
        return {name: _moved(part, device) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_moved(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch

"""holdfast.ray in functions of a Trainer, in process groups of one and of two."""

from __future__ import annotations

import os
import pickle
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from holdfast import ray
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import run_directory
from holdfast.workers.integrations import ray_train
from holdfast.workers.session import reporting


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Variables of a worker."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
              "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    return {name: str(value) for name, value in values.items()}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, value in variables(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(reporting, "report", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield tmp_path / "run"
    ray_train._runs.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def saved(place: Path, number: int) -> ray.Checkpoint:
    place.mkdir(exist_ok=True)
    (place / "state").write_text(str(number))
    return ray.Checkpoint.from_directory(place)


def restarted(run: Path, keep: int | None = None) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    ray_train._runs.clear()
    ray_train.begin(str(run), "mine", keep)


def test_a_restart_goes_on_from_the_newest_complete_checkpoint(run: Path, tmp_path: Path) -> None:
    restarted(run, keep=2)
    assert ray.get_checkpoint() is None
    for number in range(3):
        ray.report({"loss": torch.tensor(0.5)}, checkpoint=saved(tmp_path / "mine", number))
    ray.report({"loss": 0.25})
    partial = run / ".partial-checkpoint_000003"  # of a worker that was killed while it copied
    partial.mkdir()
    restarted(run, keep=2)
    assert not partial.exists()
    names = [path.name for path in run_directory.checkpoints(run)]
    assert names == ["checkpoint_000001", "checkpoint_000002"]
    checkpoint = ray.get_checkpoint()
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "state").read_text() == "2"
    assert ray_train._runs[0].reports == 3
    assert run_directory.metrics(run) == {"loss": 0.25}
    ray.report({}, checkpoint=saved(tmp_path / "mine", 3))
    assert run_directory.checkpoints(run)[-1].name == "checkpoint_000003"


def test_ranks_and_sizes_are_those_of_the_process(run: Path) -> None:
    restarted(run)
    context = ray.get_context()
    assert (context.get_world_rank(), context.get_world_size(), context.get_node_rank()) == (
        0,
        1,
        0,
    )
    assert context.get_experiment_name() == "mine"
    with pytest.raises(UserError, match=r"get_context\(\)\.get_trial_id\(\)"):
        context.get_trial_id()


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_a_batch_that_is_a_named_tuple_stays_one(run: Path) -> None:
    restarted(run)
    data: Any = [Pair(torch.ones(1), torch.zeros(1))] * 2
    [batch] = ray.prepare_data_loader(DataLoader(data, batch_size=2))
    assert type(batch) is Pair and batch.y.shape == (2, 1) and ray.get_devices() == [batch.x.device]


def test_models_and_loaders_of_one_worker_stay_as_they_are(run: Path) -> None:
    restarted(run)
    model = nn.Linear(1, 1)
    assert ray.prepare_model(model) is model
    loader = ray.prepare_data_loader(DataLoader([{"x": torch.ones(1)}] * 4, batch_size=2))
    assert [batch["x"].shape for batch in loader] == [torch.Size([2, 1])] * 2 and len(loader) == 2
    with pytest.raises(UserError, match="parallel_strategy: got fsdp"):
        ray.prepare_model(model, parallel_strategy="fsdp")
    with pytest.raises(UserError, match="checkpoint_dir_name: got mine"):
        ray.report({}, checkpoint_dir_name="mine")


def test_what_report_does_not_do_is_refused_by_name(run: Path) -> None:
    restarted(run)
    ray.report({}, checkpoint_upload_mode=ray.CheckpointUploadMode.SYNC, validation=False)
    with pytest.raises(UserError, match="checkpoint_upload_mode: got ASYNC; expected Checkpoint"):
        ray.report({}, checkpoint_upload_mode=ray.CheckpointUploadMode.ASYNC)
    with pytest.raises(UserError, match="delete_local_checkpoint_after_upload: got True"):
        ray.report({}, delete_local_checkpoint_after_upload=True)
    with pytest.raises(UserError, match="checkpoint_upload_fn: got <function"):
        ray.report({}, checkpoint_upload_fn=saved)
    with pytest.raises(UserError, match="validation: got True"):
        ray.report({}, validation=True)


# -- two ranks ----------------------------------------------------------------------------------
SAMPLES = 10


class Count(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class OwnLoader(DataLoader[int]):
    pass


def _samples(loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]


def _loaders(rank: int, path: str) -> dict[str, Any]:
    ray_train.begin(path, "mine")
    data: Any = list(range(SAMPLES))
    in_order = ray.prepare_data_loader(DataLoader(data, batch_size=2))
    generator = torch.Generator()
    theirs = OwnLoader(
        data, batch_size=2, shuffle=True, num_workers=1, prefetch_factor=3, generator=generator,
        persistent_workers=True, in_order=False,
    )  # fmt: skip
    before = _samples(theirs)
    shuffled = ray.prepare_data_loader(theirs, move_to_device=False)
    first = _samples(shuffled)
    shuffled.sampler.set_epoch(1)
    mine: DistributedSampler[int] = DistributedSampler(data, shuffle=False, drop_last=True)
    batches = BatchSampler(DistributedSampler(data, shuffle=False), 5, drop_last=False)
    weighted = DataLoader(data, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reweighted = ray.prepare_data_loader(weighted)
    whole = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 5, False))
    with pytest.raises(UserError, match=r"data_loader\.batch_sampler: got BatchSampler; .*=False"):
        ray.prepare_data_loader(whole)
    return {
        "in order": _samples(in_order),
        "before": sorted(before),
        "shuffled": (first, _samples(shuffled)),
        "kept": (
            type(shuffled), shuffled.generator is generator, shuffled.prefetch_factor,
            shuffled.persistent_workers, shuffled.in_order, shuffled.num_workers,
        ),
        "iterable": _samples(ray.prepare_data_loader(DataLoader(Count(), batch_size=4))),
        "own": ray.prepare_data_loader(DataLoader(data, sampler=mine)).sampler is mine,
        "own batches": _samples(ray.prepare_data_loader(DataLoader(data, batch_sampler=batches))),
        "warnings": [str(one.message) for one in caught],
        "weighted": _samples(reweighted),
        "as it is": _samples(ray.prepare_data_loader(whole, add_dist_sampler=False)),
    }  # fmt: skip


def test_two_ranks_divide_the_samples_of_a_loader_that_does_not_itself(two_ranks: Found) -> None:
    first, second = two_ranks["_loaders"]
    every = list(range(SAMPLES))
    assert (first["in order"], second["in order"]) == (every[::2], every[1::2])
    for epoch in range(2):
        parts = first["shuffled"][epoch], second["shuffled"][epoch]
        assert sorted(parts[0] + parts[1]) == every and list(parts[0]) != sorted(parts[0])
    assert first["shuffled"][0] != first["shuffled"][1]
    assert first["before"] == every
    for found in (first, second):
        assert found["kept"] == (OwnLoader, True, 3, True, False, 1)
        assert (found["iterable"], found["own"], found["as it is"]) == (every, True, every)
    assert (first["own batches"], second["own batches"]) == (every[::2], every[1::2])
    assert sorted(first["weighted"] + second["weighted"]) == every
    [warning] = first["warnings"]
    assert warning.startswith("prepare_data_loader replaces the WeightedRandomSampler")
    assert second["warnings"] == []


def _squares(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    return ((model(samples) - 1) ** 2).mean()


def _step(model: nn.Module, samples: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _squares(model, samples).backward()
    optimizer.step()
    return [float(value) for one in model.parameters() for value in one.detach().flatten()]


DATA = torch.arange(24.0).reshape(8, 3) / 24


def _training(rank: int, path: str) -> list[float]:
    ray_train.begin(path, "mine", backend="gloo", timeout_s=60)
    torch.manual_seed(rank)
    model = ray.prepare_model(nn.Linear(3, 1), parallel_strategy_kwargs={"bucket_cap_mb": 1})
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    data: Any = DATA
    [batch] = ray.prepare_data_loader(DataLoader(data, batch_size=4))
    return _step(model, batch)


def test_two_ranks_train_as_one_process_with_all_their_samples(two_ranks: Found) -> None:
    first, second = two_ranks["_training"]
    torch.manual_seed(0)
    assert first == second
    assert first == pytest.approx(_step(nn.Linear(3, 1), DATA), rel=1e-5)


def _elsewhere(rank: int, path: str) -> tuple[str, list[Path]]:
    ray_train._SHARED_S = 0.3
    place = Path(f"{path}-{rank}")
    with pytest.raises(UserError) as refused:
        ray_train.begin(str(place), "mine")
    return str(refused.value), list(place.glob("*")) + list(place.glob(".*"))


PARTS: list[Callable[[int, str], Any]] = [_loaders, _training, _elsewhere]
Found = dict[str, list[Any]]
"""Name of a part -> what it returned in each rank."""


def _rank(rank: int, ports: list[int], path: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for part, port in zip(PARTS, ports, strict=True):
        os.environ.update(variables(rank, 2, port), CUDA_VISIBLE_DEVICES="")
        found[part.__name__] = part(rank, path)
        ray_train._runs.clear()
        dist.destroy_process_group()
    Path(f"{path}-found-{rank}").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All parts in the same two processes: each takes seconds to import torch."""
    path = tmp_path_factory.mktemp("ranks") / "run"
    mp.spawn(_rank, ([free_port() for _ in PARTS], str(path)), nprocs=2)
    ranks = [pickle.loads(Path(f"{path}-found-{rank}").read_bytes()) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_a_storage_path_that_one_rank_does_not_see_is_refused_by_all(two_ranks: Found) -> None:
    host, [(first, rest), (second, _)] = socket.gethostname(), two_ranks["_elsewhere"]
    begin = rf"storage_path: got .*/run-0, in which rank 0 on {host} has written and "
    assert re.match(begin + f"rank 1 on {host} sees nothing; .*; set RunConfig", first)
    assert (
        second.partition("got")[2].split(",")[0].endswith("/run-1") and first[-40:] == second[-40:]
    )
    assert rest == []

"""report and get_checkpoint of holdfast.ray, in a process group of one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from holdfast import ray
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import run_directory
from holdfast.workers.integrations import ray_train
from holdfast.workers.session import reporting


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0,
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
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

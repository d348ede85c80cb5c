"""torchtitan with `--override.imports holdfast.torchtitan...`, and the reports of its checkpoint
manager then."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from holdfast.orchestrator.api.v1alpha1.load import load_job
from holdfast.orchestrator.errors import UserError
from holdfast.workers import worker_transport
from holdfast.workers.session import agent_channel, reporting
from holdfast.workers.worker_protocol import PhaseChanged, Reported, StopNotice, StopNoticeWanted

pytest.importorskip("torchtitan")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from holdfast.torchtitan import in_memory, report
from holdfast.workers.integrations.torchtitan import (
    DATA_ROOM_BYTES,
    InMemoryCheckpoints,
    ReportedCheckpoints,
)
from tests.pages import ROOT, blocks

EXAMPLE = ROOT / "examples/frameworks/torchtitan.yaml"
REPORT, IN_MEMORY = "holdfast.torchtitan.report", "holdfast.torchtitan.in_memory"


def overridden(*imports: Any) -> Any:
    config = llama3_debugmodel()
    config.checkpoint.interval, config.checkpoint.async_mode = 7, "async"
    apply_overrides(OverrideConfig(imports=list(imports)), config)
    return config.checkpoint


@pytest.mark.parametrize(
    "name, kind", [(REPORT, ReportedCheckpoints), (IN_MEMORY, InMemoryCheckpoints)]
)
def test_an_override_keeps_the_settings_and_builds_another_manager(name: str, kind: type) -> None:
    config = overridden(name)
    assert config._owner is kind
    assert (config.interval, config.async_mode) == (7, "async")
    assert isinstance(config, CheckpointManager.Config)


def test_the_room_of_the_data_loader_is_an_argument_of_the_override() -> None:
    assert overridden(IN_MEMORY).data_room_bytes == DATA_ROOM_BYTES
    assert overridden((IN_MEMORY, {"data_room_bytes": 5})).data_room_bytes == 5


def test_a_manager_of_the_user_is_refused_by_name() -> None:
    expected = "got holdfast.workers.integrations.torchtitan.ReportedCheckpoints.Config; expected"
    with pytest.raises(UserError, match=expected):
        in_memory(overridden(REPORT))


def test_the_example_and_the_lines_of_its_page_are_torchtitans() -> None:
    """Both are the same. The model needs 8 GPUs, so it is not trained here."""
    spec = yaml.safe_load(EXAMPLE.read_text())["spec"]
    assert load_job(EXAMPLE).spec.entrypoint.module == "torchtitan.train"
    page = blocks((ROOT / "docs/user/frameworks.md").read_text(), "yaml")
    (lines,) = ["\n".join(block) for block in page if "torchtitan.train" in "".join(block)]
    assert yaml.safe_load(lines).items() <= spec.items()
    config = ConfigManager().parse_args(spec["entrypoint"]["args"])
    apply_overrides(config.override, config)
    assert config.checkpoint.enable and config.checkpoint._owner is InMemoryCheckpoints


class Agent:
    """The end of the agent."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.got: list[Any] = []

    def received(self, kind: Any) -> list[Any]:
        """All messages of this kind so far."""
        while True:
            try:
                self.got.append(worker_transport.receive(self.link)[0])
            except BlockingIOError:
                return [one for one in self.got if isinstance(one, kind)]

    def phases(self) -> list[str]:
        return [one.phase for one in self.received(PhaseChanged)]


@dataclass
class SmallTrainer:
    """torchtitan's Trainer as a checkpoint manager sees it."""

    model: torch.nn.Module
    optimizers: Any
    step: int = 0
    ntokens_seen: int = 0
    validated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        training = SimpleNamespace(steps=20, global_batch_size=-1, local_batch_size=4, seq_len=8)
        self.config = SimpleNamespace(training=training)
        self.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=3, pp_enabled=True)
        self.metrics_processor = SimpleNamespace(
            num_flops_per_token=10, log=lambda *_args, **_more: None
        )
        self.validator = SimpleNamespace(validate=lambda _parts, step: self.validated.append(step))
        self.model_parts, self.lr_schedulers, self.dataloader = [self.model], Position(), Position()

    def should_continue_training(self) -> bool:
        return self.step < self.config.training.steps

    def train_step(self, batches: Iterator[Any]) -> None:
        if next(batches, None) is None:
            raise DataloaderExhaustedError

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class Position:
    """Position of a schedule or a data loader."""

    def state_dict(self) -> dict[str, int]:
        return {"last_epoch": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    ours, theirs = worker_transport.pair()
    channel = agent_channel.AgentChannel(theirs)
    monkeypatch.setattr(agent_channel, "of_process", lambda: channel)
    monkeypatch.setattr(reporting, "_last", reporting._Steps())
    with ours, theirs:
        yield Agent(ours)


def manager(make: Any, out: Path, **settings: Any) -> tuple[Any, SmallTrainer]:
    config = CheckpointManager.Config(enable=True, interval=5, keep_latest_k=0, **settings)
    model = torch.nn.Linear(3, 2)
    optimizer = default_adamw(lr=1e-3)
    optimizer.implementation = "for-loop"
    trainer = SmallTrainer(model, optimizer.build(model_parts=[model]))
    built = make(config).build(
        dataloader=None, model_parts=[model], optimizers=trainer.optimizers,
        lr_schedulers=Position(), states={"train_state": trainer}, sd_adapter=None,
        base_folder=str(out),
    )  # fmt: skip
    return built, trainer


def trained(built: Any, trainer: SmallTrainer, steps: int) -> None:
    for _ in range(steps):
        trainer.step += 1
        trainer.metrics_processor.log(trainer.step, 0.5 * trainer.step, 1.0, 1.0)
        built.save(trainer.step, last_step=trainer.step == 20)


def test_steps_saves_and_validations_are_reported(agent: Agent, tmp_path: Path) -> None:
    built, trainer = manager(report, tmp_path)
    assert built.load() is False
    trained(built, trainer, 6)
    reports = agent.received(Reported)
    assert [(one.step, one.loss) for one in reports] == [(at, 0.5 * at + 0.5) for at in range(6)]
    assert {(one.tokens, one.flops_per_step, one.total_steps) for one in reports} == {
        (96, 960.0, 20)
    }
    assert agent.phases() == ["build", "save", "train"], "one save"
    assert (tmp_path / "checkpoint" / "step-5" / ".metadata").is_file()
    trainer.validator.validate([], 6)
    assert agent.phases()[3:] == ["evaluate", "train"]
    assert trainer.validated == [6]


def test_a_restart_begins_after_the_step_of_torchtitans_checkpoint(
    agent: Agent, tmp_path: Path
) -> None:
    trained(*_loaded(tmp_path), 6)
    reporting._last.step = None  # of another process
    built, trainer = _loaded(tmp_path)
    assert trainer.step == 5
    trained(built, trainer, 1)
    assert [one.step for one in agent.received(Reported)][-2:] == [5, 5]


def _loaded(out: Path) -> tuple[Any, SmallTrainer]:
    built, trainer = manager(report, out)
    built.load()
    return built, trainer


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_before_a_planned_stop_a_checkpoint_is_complete(
    agent: Agent, tmp_path: Path, mode: str, request: pytest.FixtureRequest
) -> None:
    if mode == "async":
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        request.addfinalizer(torch.distributed.destroy_process_group)
    built, trainer = manager(report, tmp_path, async_mode=mode)
    built.load()
    trained(built, trainer, 1)
    worker_transport.send(agent.link, StopNotice(after_step=2, grace_s=30.0))
    trained(built, trainer, 1)
    assert agent.received(StopNoticeWanted)
    with pytest.raises(SystemExit) as leaving:
        trained(built, trainer, 1)
    assert not leaving.value.code
    assert (tmp_path / "checkpoint" / "step-3" / ".metadata").is_file()


def test_without_checkpoints_of_torchtitan_a_planned_stop_comes_as_sigterm(
    agent: Agent, tmp_path: Path
) -> None:
    built, trainer = manager(report, tmp_path, load_only=True)
    built.load()
    trained(built, trainer, 6)
    assert len(agent.received(Reported)) == 6 and not agent.received(StopNoticeWanted)
    assert not (tmp_path / "checkpoint").exists()


def test_pipelines_are_refused_by_name(agent: Agent, tmp_path: Path) -> None:
    built, _trainer = manager(in_memory, tmp_path)
    with pytest.raises(UserError, match="got pipeline_parallel_degree > 1; expected"):
        built.load()


@pytest.mark.parametrize("batches", [3, 30])
def test_without_an_agent_it_trains_and_finishes_with_its_steps_or_its_data(
    batches: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    built, trainer = manager(in_memory, tmp_path)
    trainer.parallel_dims.pp_enabled = False
    request.addfinalizer(torch.distributed.destroy_process_group)
    assert built.load() is False
    data = iter(range(batches))
    exhausted = False
    while trainer.should_continue_training() and not exhausted:
        assert not built._finished
        try:
            trainer.train_step(data)
        except DataloaderExhaustedError:
            exhausted = True
        else:
            trained(built, trainer, 1)
    assert built._finished and exhausted == (batches == 3)
    assert built._session.next_step == min(batches, 20)
    assert (tmp_path / "checkpoint" / "step-20").exists() == (batches == 30)

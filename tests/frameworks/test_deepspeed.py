"""Reports of the real DeepSpeed's engines: one rank, with the agent's end of its channel here."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.session import reporting

from .agent_end import AgentEnd, agent

__all__ = ["agent"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setitem(os.environ, name, value)
        import deepspeed
        import torch.distributed as dist

        deepspeed.init_distributed("gloo")
        yield
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.workers.integrations import deepspeed

    monkeypatch.setattr(deepspeed, "_reports", [])


CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
}


def initialize(model: Any, accumulate: int = 1) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config=CONFIG | {"gradient_accumulation_steps": accumulate},
    )  # fmt: skip
    return engine


def watched(agent: AgentEnd) -> Any:
    """A model that notes in which phase it is called."""
    import torch
    from torch import nn

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def train_batch(self) -> None:
            """Some models have it; an engine answers for its model."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            agent.sees("training" if self.training and torch.is_grad_enabled() else "evaluation")
            return self.layer(inputs)

    return Watched()


def micro_batch(engine: Any) -> float:
    """Trains it; returns its loss."""
    import torch

    loss = engine(torch.randn(4, 4)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def test_steps_have_the_loss_of_all_their_micro_batches_and_saves_and_evaluations_a_phase(
    agent: AgentEnd, tmp_path: Path
) -> None:
    import torch

    from holdfast.integrations import report_deepspeed

    engine = initialize(watched(agent), accumulate=2)
    assert report_deepspeed(report_deepspeed(engine, total_steps=3, tokens=512)) is engine
    losses = [micro_batch(engine) for _ in range(5)]
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2]
    engine.eval()
    engine(torch.randn(4, 4))
    engine.train()
    with torch.no_grad():
        engine(torch.randn(4, 4))
    assert agent.channel.phase == "evaluate"
    assert engine.save_checkpoint(str(tmp_path), tag="t")
    losses.append(micro_batch(engine))
    assert agent.channel.phase == "finish", "that was the last step"
    with torch.no_grad():
        engine(torch.randn(4, 4))
    assert agent.phases_of("training") == {"train"}
    assert agent.phases_of("evaluation") == {"evaluate"}
    assert worker_protocol.PhaseChanged(phase="save") in agent.messages()
    assert [(one.step, one.total_steps, one.tokens) for one in agent.steps] == [
        (step, 3, 512) for step in range(3)
    ]
    means.append(sum(losses[4:]) / 2)
    assert [one.loss for one in agent.steps] == pytest.approx(means)


def test_a_planned_stop_saves_after_its_step_and_ends(agent: AgentEnd, tmp_path: Path) -> None:
    from holdfast.integrations import report_deepspeed

    engine = initialize(watched(agent))

    def save(step: int) -> None:
        engine.save_checkpoint(str(tmp_path), tag=f"after-{step}")

    report_deepspeed(engine, save=save)
    worker_transport.send(agent.link, worker_protocol.StopNotice(after_step=2, grace_s=25.0))
    with pytest.raises(SystemExit) as stop:
        for _ in range(9):
            micro_batch(engine)
    assert stop.value.code == 0
    assert (tmp_path / "latest").read_text() == "after-2"
    again = initialize(watched(agent))
    again.load_checkpoint(str(tmp_path))
    assert again.global_steps == 3


def test_the_steps_of_the_first_engine_count(
    agent: AgentEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.integrations import report_deepspeed

    monkeypatch.setattr(reporting, "TICK_S", 0.0)
    generator = report_deepspeed(initialize(watched(agent)), total_steps=2)
    critic = report_deepspeed(initialize(watched(agent)))
    micro_batch(generator)
    for _ in range(5):
        micro_batch(critic)
    assert agent.ticks >= 5
    micro_batch(generator)
    micro_batch(critic)
    assert agent.channel.phase == "finish", "also while the critic ends its training"
    assert [one.step for one in agent.steps] == [0, 1]


def test_a_pipeline_reports_by_train_batch(agent: AgentEnd) -> None:
    from itertools import repeat

    import torch
    from deepspeed.pipe import PipelineModule
    from torch import nn

    from holdfast.integrations import report_deepspeed

    model = PipelineModule(
        layers=[watched(agent)], num_stages=1, loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    engine = report_deepspeed(initialize(model, accumulate=2), total_steps=3)
    batches = repeat((torch.ones(4, 4), torch.zeros(4, 1)))
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    engine.eval_batch(batches)
    losses.append(float(engine.train_batch(batches)))
    assert agent.phases_of("training") == {"train"}
    assert agent.phases_of("evaluation") == {"evaluate"}
    assert agent.channel.phase == "finish"
    assert [one.step for one in agent.steps] == [0, 1, 2]
    assert [one.loss for one in agent.steps] == pytest.approx(losses) and losses[2] < losses[0]

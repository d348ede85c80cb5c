"""Reports of ranks while a DeepSpeed checkpoint, as in test_zero_sizes.py, is converted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.orchestrator.protocol.facts import PREPARING
from holdfast.workers import worker_protocol
from holdfast.workers.integrations import resumed_deepspeed
from holdfast.workers.session import agent_channel, reporting


def test_ranks_that_wait_for_a_conversion_prepare_and_show_that_they_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[worker_protocol.FromWorker] = []
    channel = SimpleNamespace(phase="start", send=sent.append)

    def enter(phase: str) -> None:
        channel.phase = phase
        channel.send(worker_protocol.PhaseChanged(phase=phase))  # type: ignore[arg-type]

    channel.enter = enter
    clock = [100.0]
    states = iter([("runs", ""), ("runs", ""), ("same", "")])

    def of_rank_0(*_: object) -> tuple[str, str]:
        clock[0] += reporting.TICK_S
        assert channel.phase in PREPARING, "its collectives begin no training"
        return next(states)

    monkeypatch.setattr(agent_channel, "of_process", lambda: channel)
    monkeypatch.setattr(reporting, "_last", reporting._Steps())
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(resumed_deepspeed.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(resumed_deepspeed, "_from_first", of_rank_0)
    engine = SimpleNamespace(seq_dp_world_size=2)
    assert resumed_deepspeed._converted(engine, Path("/checkpoints/step-20")) is None
    assert sent == [
        worker_protocol.PhaseChanged(phase="restore"),
        *[worker_protocol.ProgressTick()] * 3,
        worker_protocol.PhaseChanged(phase="start"),
    ]

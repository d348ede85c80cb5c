"""The loop of attempts: its order, its errors, and what halts an attempt."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from holdfast import session
from holdfast.orchestrator.errors import UserError
from holdfast.workers.session import attempts as attempts_module
from holdfast.workers.session.attempts import AttemptHalted, Attempts, checksum
from holdfast.workers.session.core import Session


class NoGroups:
    """Process groups without connections."""

    cuts, whole = 0, True

    def cut(self) -> None:
        self.cuts += 1


@pytest.fixture
def alone() -> Iterator[Session]:
    yield session.init()
    session.leave()


@pytest.fixture
def kept() -> Iterator[Attempts]:
    before = signal.getsignal(attempts_module.SIGNAL)
    attempts = Attempts(NoGroups(), "")  # type: ignore[arg-type]
    attempts.wanted = True
    yield attempts
    signal.signal(attempts_module.SIGNAL, before)


def restored(s: Session) -> Session:
    model = nn.Linear(2, 1)
    s.restore(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return s


def halt_soon(attempts: Attempts, after_s: float = 0.05) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(after_s), attempts.halt()))
    thread.start()
    return thread


def test_a_loop_of_attempts_is_an_ordinary_loop_without_an_agent(alone: Session) -> None:
    done = []
    for step in restored(alone).steps(3):
        with alone.attempt():
            done.append(step)
            alone.step(step)
    assert done == [0, 1, 2] and list(alone.steps(3)) == []


def test_wrong_uses_are_errors_with_what_to_write(alone: Session) -> None:
    with pytest.raises(UserError, match=r"session.steps: got a call before restore"):
        next(alone.steps(2))
    with pytest.raises(UserError, match=r"expected `for step in s.steps\(total_steps\):` around"):
        restored(alone).attempt()
    for step in alone.steps(1):
        with pytest.raises(UserError, match=r"got step 0 outside an attempt"):
            alone.step(step)
        with (
            pytest.raises(UserError, match="got an attempt within one"),
            alone.attempt(),
            alone.attempt(),
        ):
            pass
        with alone.attempt():
            alone.step(step)
    loop = alone.steps(3)
    next(loop)
    with pytest.raises(UserError, match=r"got no s.step\(1\) in the body"):
        next(loop)


def test_an_error_of_the_body_is_the_scripts(alone: Session, kept: Attempts) -> None:
    with pytest.raises(ZeroDivisionError), kept:
        _ = 1 / 0
    kept._halting.set()  # also while a peer's death is being dealt with
    with pytest.raises(KeyError), kept:
        raise KeyError("mine")
    kept._halting.clear()
    kept.wanted = False
    with pytest.raises(RuntimeError, match="by peer"), kept:
        raise RuntimeError("[gloo/transport] Connection closed by peer")


def test_a_frameworks_loop_is_an_attempt_at_each_step_but_not_at_its_phases(
    alone: Session, kept: Attempts
) -> None:
    steps, is_open = [], lambda: alone._attempts.is_open
    for start in restored(alone).loops(str):
        with alone.attempt():
            for step in range(start, 3):
                with alone.phase("evaluate"), alone.phase("save"):
                    assert not is_open()
                with contextlib.suppress(ValueError), alone.phase("evaluate"):
                    raise ValueError("mine")
                assert is_open()
                alone.step(step)
                steps.append(step)
    assert steps == [0, 1, 2] and not is_open()
    kept._halting.set()  # a peer that dies in a phase ends this process too
    with pytest.raises(RuntimeError, match="by peer"), kept, kept.suspended():
        raise RuntimeError("[gloo/transport] Connection closed by peer")


@pytest.mark.parametrize("swallows", [False, True])
def test_python_code_and_sleeps_are_halted_even_if_the_script_catches_every_exception(
    kept: Attempts, swallows: bool
) -> None:
    thread = halt_soon(kept)
    with kept:
        while True:
            try:
                time.sleep(60)
            except Exception:
                assert swallows
    assert kept.failed and kept.halting
    kept.halted()
    thread.join(5)
    kept.resumed()
    assert not kept.failed and not kept.halting and not kept.wanted


def test_a_broken_connection_ends_the_attempt_once_the_agent_halts_it(kept: Attempts) -> None:
    thread = halt_soon(kept)
    error = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    with kept:
        raise error
    kept.halted()
    thread.join(5)
    assert kept.failed and error.__traceback__ is None


def test_what_the_session_does_is_not_interrupted(kept: Attempts) -> None:
    done = []
    with kept:
        with pytest.raises(AttemptHalted), kept.shielded():
            thread = halt_soon(kept, 0)
            time.sleep(0.2)
            done.append("whole")
        raise AttemptHalted
    kept.halted()
    thread.join(5)
    assert done == ["whole"]


def test_a_checksum_shows_a_changed_bit_and_the_order() -> None:
    one, two = torch.arange(8.0), torch.ones(3)
    before = checksum([one, two])
    assert before == checksum([one.clone(), two.clone()]) != checksum([two, one])
    one[3] = torch.nextafter(one[3], torch.tensor(9.0))
    assert checksum([one, two]) != before and 0 <= before < 2**62


def test_an_attempt_without_peers_ends_with_s_step_and_so_does_an_error_in_it(
    kept: Attempts,
) -> None:
    kept.rehearses = True
    with kept:
        kept.expect_open(7, is_last=False)
        pytest.fail("s.step ends it")
    assert kept.over
    kept.failed = False
    with kept:
        raise ValueError("a loss without peers is no number")
    assert kept.over
    with pytest.raises(KeyboardInterrupt), kept:
        raise KeyboardInterrupt

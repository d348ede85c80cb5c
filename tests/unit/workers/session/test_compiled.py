"""Kept processes whose model is compiled, in its first step only; nothing cuts the compiler."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, Store

from holdfast import session
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.session import attempts as attempts_module
from holdfast.workers.session import groups
from holdfast.workers.session.attempts import Attempts, num_graphs, versions, why_not
from holdfast.workers.session.core import Session

from .test_attempts import NoGroups
from .test_groups import in_two_processes

needs_torch = pytest.mark.skipif(bool(groups.why_not_formed()), reason=groups.why_not_formed())


class Groups(NoGroups):
    foreign = scales = False
    connected, num_collectives = True, 10_000


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(attempts_module.SIGNAL)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    signal.signal(attempts_module.SIGNAL, before)
    torch._dynamo.utils.counters.clear()


def interrupts(graph: Any, _: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend for dynamo that a halt meets."""
    signal.raise_signal(attempts_module.SIGNAL)
    return graph.forward  # type: ignore[no-any-return]


def test_a_halt_waits_for_the_compiler() -> None:
    attempts = Attempts(Groups(), "")  # type: ignore[arg-type]
    attempts.wanted = True
    attempts._halting.set()
    done: list[float] = []
    with attempts:
        done.append(
            float(torch.compile(lambda value: value + 1, backend=interrupts)(torch.ones(())))
        )
        signal.raise_signal(attempts_module.SIGNAL)
        done.append(0.0)
    assert done == [2.0] and attempts.failed and num_graphs()


def stepped(model: nn.Module) -> Session:
    """A session whose first step has run the compiled model."""
    s = session.init()
    s._attempts = Attempts(Groups(), "")  # type: ignore[arg-type]
    s.restore(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 2))
    s._attempts.num_graphs = num_graphs()
    return s


@pytest.mark.parametrize(
    ("tensor", "phase", "kept"), [(1, "evaluate", True), (2, "evaluate", False), (1, "save", False)]
)
def test_a_process_that_compiles_again_is_kept_only_if_steps_do_not_run_it(
    tensor: int, phase: Any, kept: bool
) -> None:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    s = stepped(model)
    assert s._state is not None and not s._why_not(s._state)
    assert "compiled for this size" in s._why_fixed_size()
    s._why_no_loop = str
    assert s._why_not(s._state) == "the framework's model is compiled"
    s._why_no_loop = None
    s.shape = Mesh(1, 1, tensor)
    with s.phase(phase), torch.no_grad():
        model(torch.ones(2, 2))
    assert bool(s._why_not(s._state)) != kept
    model(torch.ones(3, 2))
    assert s._why_not(s._state) == "torch.compile compiles again after the first step"
    session.leave()


def test_compiled_autograd_keeps_no_process() -> None:
    model, value = nn.Linear(2, 2), torch.ones(2, 2)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: model(value).sum().backward(), backend="eager")()
    assert why_not(model, versions(model)) == "autograd is compiled"


@needs_torch
def test_dynamo_makes_sizes_constants_without_a_guard() -> None:
    """Compiled processes are not kept at another size. If this fails, dynamo guards the size."""

    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        switch = groups.SwitchStore(stores[0]())
        made = groups.Groups(switch, rank, 2, 1, connected=True, replicas=2)
        dist.init_process_group("gloo", store=switch, rank=rank, world_size=2)
        scaled = torch.compile(lambda value: value * dist.get_world_size(), backend="eager")
        assert float(scaled(torch.ones(()))) == 2
        if rank == 0:
            made.connect(HashStore(), 0, 1, 2, lambda: False)
            assert (dist.get_world_size(), float(scaled(torch.ones(())))) == (1, 2)

    in_two_processes(work)

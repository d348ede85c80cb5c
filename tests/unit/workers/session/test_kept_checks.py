"""Cases in which no process is kept, or one ends: it would train on other numbers."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast import session
from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1.resilience import Checkpoint
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.session import attempts as attempts_module
from holdfast.workers.session import groups
from holdfast.workers.session.attempts import AttemptHalted, Attempts, reset, versions, why_not
from holdfast.workers.session.distributed import Meshes
from holdfast.workers.session.groups import ReplicasDiverged

from .test_attempts import NoGroups
from .test_groups import in_two_processes, joined

needs_torch = pytest.mark.skipif(bool(groups.why_not_formed()), reason=groups.why_not_formed())


@pytest.fixture
def attempts() -> Iterator[Attempts]:
    before = signal.getsignal(attempts_module.SIGNAL)
    made = Attempts(NoGroups(), "")  # type: ignore[arg-type]
    made.wanted = True
    yield made
    signal.signal(attempts_module.SIGNAL, before)


# -- collectives --------------------------------------------------------------------------------
@needs_torch
def test_collectives_between_the_restore_and_an_attempt_or_between_two_keep_no_process() -> None:
    """A new process begins them alone: the kept ones are in their loop."""

    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        made, _ = joined(rank, stores[0](), connected=True)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        for restored in (True, False):
            s = session.init(shard=1)
            s._attempts = Attempts(made, "")
            made.num_collectives = 10_000  # those before the restore are judged apart
            s.restore(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))
            if restored:
                dist.barrier()
            for step in s.steps(3):
                with s.attempt():
                    assert bool(s._attempts.why_not) == (restored or step == 2)
                    dist.barrier()
                    s.step(step)
                if step == 1:
                    dist.barrier()
            assert "collectives outside its attempts" in s._attempts.why_not

    in_two_processes(work)


# -- random numbers -------------------------------------------------------------------------------
DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.randperm(9),
    "random": random.random,
    "numpy": lambda: np.random.rand(),
}


def seeded(attempts: Attempts, step: int) -> None:
    attempts.seeds()
    random.seed(step)
    torch.manual_seed(step)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_drawn_without_a_seed_show_in_a_first_step_and_later_when_the_process_leaves(
    attempts: Attempts, draw: Callable[[], object]
) -> None:
    attempts.begin(first=True, kept=False)
    attempts.look_at_random()
    attempts.begin(first=False, kept=False)
    attempts.look_at_random(leaves=True)
    assert not attempts.why_not
    draw()
    attempts.look_at_random()
    assert not attempts.why_not, "until processes are kept, all ranks draw the same"
    attempts.look_at_random(leaves=True)
    assert "random numbers" in attempts.why_not
    attempts.why_not = ""
    attempts.begin(first=True, kept=False)
    draw()
    attempts.look_at_random()
    assert "random numbers" in attempts.why_not


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_step_after_processes_were_kept_is_watched(
    attempts: Attempts, draw: Callable[[], object]
) -> None:
    for step in range(3):
        attempts.begin(first=step == 0, kept=True)
        seeded(attempts, step)
        torch.rand(2), random.random()
        attempts.look_at_random()
    assert not attempts.why_not
    draw()  # before the next seed
    attempts.begin(first=False, kept=True)
    seeded(attempts, 3)
    attempts.look_at_random()
    assert "random numbers" in attempts.why_not


# -- replicas -------------------------------------------------------------------------------------
def frozen(model: nn.Linear, _: torch.optim.Optimizer, rank: int) -> None:
    with torch.no_grad():
        model.bias.add_(rank)


def trained(model: nn.Linear, _: torch.optim.Optimizer, rank: int) -> None:
    with torch.no_grad():
        model.weight.add_(rank)


def setting(_: nn.Linear, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.param_groups[0]["lr"] *= 1 + rank


def same(*_: object) -> None:
    pass


def compared(change: Callable[..., None], rank: int, *, kept: bool, step: int = 0) -> str:
    """Verdict of the comparison after a step on ranks that one `change` has made different."""
    s = session.init(shard=1)
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)
    with torch.no_grad():
        model.weight.fill_(1), model.bias.fill_(2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    s.restore(model, optimizer, keep="trainable")
    change(model, optimizer, rank)
    s._loops, s._num_compared, s._kept, s._attempts.why_not = True, 0 if step == 0 else 2, kept, ""
    s._checkpoint = Checkpoint()
    try:
        s._compare_replicas(s._state, step)  # type: ignore[arg-type]
    except ReplicasDiverged as error:
        return f"diverged: {error}"
    return s._attempts.why_not


def test_replicas_that_differ_stop_kept_processes_and_keep_none_of_others() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=stores[0](), rank=rank, world_size=2)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        for kept in (False, True):
            assert compared(same, rank, kept=kept) == ""
            for change in (frozen, trained, setting):
                said = compared(change, rank, kept=kept)
                assert said.startswith("diverged" if kept else "ranks have"), change
                assert ("learning rates" in said) == (change is setting)

    in_two_processes(work)


def test_once_processes_were_kept_replicas_are_compared_before_each_checkpoint_in_storage() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=stores[0](), rank=rank, world_size=2)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        for change in (trained, setting):
            assert compared(change, rank, kept=True, step=199).startswith("diverged")
            assert compared(change, rank, kept=True, step=198) == ""
            assert compared(change, rank, kept=False, step=199) == ""

    in_two_processes(work)


def test_a_schedule_that_restore_did_not_get_keeps_no_process() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not TrainingState(model, optimizer, None).lacks_schedule
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert TrainingState(model, optimizer, {"seen": 1}).lacks_schedule
    for extra in (schedule, {"schedule": schedule}):
        assert not TrainingState(model, optimizer, extra).lacks_schedule


# -- the model ------------------------------------------------------------------------------------
class Counting(nn.Module):
    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)


def test_a_buffer_that_checkpoints_do_not_have_may_not_be_written() -> None:
    for persistent in (True, False):
        model = nn.ModuleList([Counting(persistent=persistent)])
        before = versions(model)
        assert not why_not(model, before)
        model[0].seen.add_(1)
        assert bool(why_not(model, before)) != persistent


def counts(model: Any) -> None:
    model[0].calls += 1


def thaws(model: Any) -> None:
    model[1].requires_grad_(requires_grad=True)


@pytest.mark.parametrize(("changes", "name"), [(counts, "0.calls"), (thaws, "1.weight")])
def test_a_model_that_counts_or_trains_other_parameters_is_not_kept(
    changes: Callable[[nn.Module], None], name: str
) -> None:
    model = nn.ModuleList([Counting(persistent=True), nn.Linear(2, 2).requires_grad_(False)])
    before = versions(model)
    model.eval()
    assert not why_not(model, before)
    changes(model)
    assert f"the model changes {name}," in why_not(model, before)


def ddp(**settings: Any) -> nn.Module:
    return DistributedDataParallel(nn.Linear(2, 2), **settings)


def power_sgd() -> nn.Module:
    model = ddp()
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # type: ignore[operator]
    return model


def fp16_hook() -> nn.Module:
    model: Any = ddp()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model  # type: ignore[no-any-return]


def hsdp_hook() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
    model.set_all_reduce_hook(lambda tensor: tensor)
    return model  # type: ignore[no-any-return]


@needs_torch
def test_a_model_whose_communication_has_state_is_not_kept() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        joined(rank, stores[0](), connected=True)
        model = ddp()
        assert not why_not(model, versions(model))
        for make in (lambda: ddp(static_graph=True), fp16_hook, power_sgd):
            model = make()
            assert "static graph or a communication hook" in why_not(model, versions(model))
        model = hsdp_hook()
        assert "hook for its all-reduce" in why_not(model, versions(model))

    in_two_processes(work)


@needs_torch
def test_a_sharded_module_that_is_never_called_has_nothing_to_reset() -> None:
    """Averaged weights, or a model whose first forward was never reached."""

    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        made, _ = joined(rank, stores[0](), connected=True)
        model = nn.ModuleDict({"model": nn.Linear(2, 2), "average": nn.Linear(2, 2)})
        for part in model.values():
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        modes = [True] * len(list(model.modules()))
        reset(model, made, modes)
        called = model["model"]
        with pytest.raises(RuntimeError, match="shapes"):
            called(torch.ones(1, 3))
        state = called._get_fsdp_state()  # type: ignore[operator]
        assert state._training_state.name != "IDLE"
        reset(model, made, modes)
        assert state._training_state.name == "IDLE"

    in_two_processes(work)


@needs_torch
def test_a_gradient_scaler_and_a_second_session_are_seen() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        scaler = GradScaler("cpu")  # may be older than the session
        made, _ = joined(rank, stores[0](), connected=True)
        optimizer = torch.optim.SGD([weight := nn.Parameter(torch.ones(2))], lr=0.1)
        for one in (GradScaler("cpu", enabled=False), scaler):
            assert not made.scales
            one.scale(weight.sum())
            weight.grad = torch.ones(2)  # backward has threads, which a fork does not get
            one.step(optimizer)
            one.update()
        assert made.scales
        assert groups.why_not_formed() == "session.init was called before in this process"

    in_two_processes(work)


# -- threads and signals --------------------------------------------------------------------------
@needs_torch
def test_only_the_main_thread_makes_a_session_and_runs_a_loop_that_is_kept() -> None:
    with ThreadPoolExecutor(1) as other:
        assert "main thread" in other.submit(groups.why_not_formed).result()
        model = nn.Linear(1, 1)
        assert "main thread" in other.submit(why_not, model, versions(model)).result()


def test_nothing_is_cut_once_the_attempt_is_over(attempts: Attempts) -> None:
    cuts: list[bool] = []

    def cut() -> None:
        attempts._over.set()  # the main thread goes on meanwhile, to its next generation
        cuts.append(True)

    attempts.groups.cut = cut  # type: ignore[method-assign, union-attr]
    attempts.halt()
    attempts.halted()
    assert cuts == [True] and attempts.halting


class Guard:
    """A context manager whose state must not stay half entered."""

    def __init__(self) -> None:
        self.entered = False

    def __enter__(self) -> None:
        signal.raise_signal(attempts_module.SIGNAL)
        self.entered = True

    def __exit__(self, *_: object) -> None:
        signal.raise_signal(attempts_module.SIGNAL)
        self.entered = False

    def __del__(self) -> None:
        signal.raise_signal(attempts_module.SIGNAL)


def test_a_context_manager_is_neither_half_entered_nor_half_left(attempts: Attempts) -> None:
    attempts._halting.set()
    done = []
    with attempts:
        guard = Guard()
        with guard:
            done.append(guard.entered)
        done.append(guard.entered)
        del guard
        done.append("deleted")
        signal.raise_signal(attempts_module.SIGNAL)
        done.append("not reached")
    assert done == [True, False, "deleted"] and attempts.failed


def test_a_generator_of_the_script_is_not_closed_by_a_halt(attempts: Attempts) -> None:
    def batches() -> Iterator[int]:
        for number in range(9):
            signal.raise_signal(attempts_module.SIGNAL)
            yield number

    def loop() -> Iterator[object]:  # the attempt itself may run in one
        with attempts:
            assert next(data) == 0
            signal.raise_signal(attempts_module.SIGNAL)
            yield "not reached"

    attempts._halting.set()
    data = batches()
    assert list(loop()) == [] and attempts.failed
    assert next(data) == 1


def test_a_step_whose_peer_is_gone_counts_unless_it_is_halted(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts.groups.whole = False  # type: ignore[misc, union-attr]
    threading.Timer(0.1, attempts._halting.set).start()
    with attempts:
        attempts.expect_open(3, is_last=False)
    assert attempts.failed
    attempts.wanted = not attempts.resumed()
    with attempts:
        attempts.expect_open(4, is_last=True)
    monkeypatch.setattr(limits, "HALT_S", 0.01)
    with attempts:
        attempts.expect_open(4, is_last=False)  # the peers have left the loop early
    assert not attempts.failed


def test_a_step_after_a_bare_except_raises_again(attempts: Attempts) -> None:
    attempts._halting.set()
    with attempts:
        try:
            signal.raise_signal(attempts_module.SIGNAL)
        except BaseException as error:  # a script's `except:`
            assert isinstance(error, AttemptHalted)
        attempts.expect_open(3, is_last=False)
    assert attempts.failed


# -- sizes ----------------------------------------------------------------------------------------
def test_a_mesh_that_is_first_used_after_a_shrink_has_the_new_sizes() -> None:
    s = session.init()
    s.meshes = Meshes(Mesh(2, 1), "cpu")
    s.meshes.resized(Mesh(1, 1))
    assert s.mesh.size() == 1
    session.leave()


@pytest.mark.parametrize(
    ("outside", "within", "why"),
    [
        ("rank mesh", "data_parallel_rank data_parallel_size", ""),
        ("", "data_parallel_size", "do not read both"),
        ("data_parallel_rank data_parallel_size", "", "outside"),
        ("data_parallel_size", "data_parallel_rank data_parallel_size", "outside"),
        ("world_size", "data_parallel_rank data_parallel_size", "outside"),
        ("", "data_parallel_rank data_parallel_size fsdp_mesh", "a mesh"),
    ],
)
def test_another_size_keeps_processes_only_of_scripts_that_read_it_in_each_step_alone(
    outside: str, within: str, why: str
) -> None:
    s = session.init()
    model = nn.Linear(2, 1)
    s.restore(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name in outside.split():
        getattr(s, name)
    for step in s.steps(1):
        with s.attempt():
            for name in within.split():
                getattr(s, name)
            s.step(step)
    said = s._why_fixed_size()
    assert why in said if why else not said
    session.leave()

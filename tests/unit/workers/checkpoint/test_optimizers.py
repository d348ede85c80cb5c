"""Optimizer state: staged if it can be restored, with reserved space, and restored unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.layout import parse_header
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.session.shards import local_parameter
from tests.unit.workers.checkpoint.fake_ranks import (
    Memory,
    as_rank,
    build,
    restore_alone,
    staged_alone,
    step,
)

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "NAdam": torch.optim.NAdam,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD-without-momentum": lambda p: torch.optim.SGD(p, lr=0.1),
}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        torch.manual_seed(number)
        model(torch.randn(5, 2, 3, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_restored_optimizer_continues_unchanged(make: Make) -> None:
    model = net()
    optimizer = make(list(model.parameters()))
    train(model, optimizer, range(3))
    file = staged_alone(model, optimizer)
    again = net()
    state = restore_alone(file, again, make(list(again.parameters())))
    train(model, optimizer, range(3, 6))
    train(again, state.optimizer, range(3, 6))
    for got, want in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_factored_state_of_a_sharded_parameter_is_refused_at_the_first_staging() -> None:
    with as_rank(0, 2):
        model, _ = build(1, 2, seed=1)
        parts = [local_parameter(p) for p in model.parameters()]
        optimizer = torch.optim.Adafactor(parts, lr=0.1)
        memory = Memory()
        stager = Stager(
            TrainingState(model, optimizer, None), memory,
            generation=1, shard=0, num_shards=2, device=torch.device("cpu"),
        )  # fmt: skip
        for part in parts:
            part.grad = torch.ones_like(part)
        optimizer.step()
        with pytest.raises(UserError, match=r"optim.first.weight.row_var: got shape .*AdamW"):
            stager.stage(0)
        assert not memory.file


def test_factored_state_of_an_unsharded_parameter_is_not_read_into_a_sharded_one() -> None:
    with as_rank(0, 1):
        model, _ = build(1, 1, seed=1)
        optimizer = torch.optim.Adafactor(model.parameters())
        step(model, optimizer, seed=1)
        file = staged_alone(model, optimizer)
    with as_rank(0, 2):
        sharded, _ = build(1, 2, seed=2)
        with pytest.raises(UserError, match=r"\(7, 3\), which is sharded.*AdamW"):
            restore_alone(file, sharded, torch.optim.Adafactor(sharded.parameters()))


class Keeping(torch.optim.SGD):
    """Keeps numbers, text and wider tensors than its parameters, as optimizers elsewhere do."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].update(step=1, note="what it keeps of one parameter")
                    self.state[parameter]["exact"] = parameter.detach().double()
        return result


ROOM: dict[str, Make] = {
    **{name: OPTIMIZERS[name] for name in ("AdamW", "Adafactor", "SGD", "SGD-without-momentum")},
    "ASGD": torch.optim.ASGD,
    "numbers-beside-tensors": lambda p: Keeping(p, lr=0.1, momentum=0.9),
}
NAME = "a_child_with_a_long_name_as_models_have_them_now_and_then"


@pytest.mark.parametrize("make", ROOM.values(), ids=ROOM.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_without_early_gradients_have_reserved_space(
    make: Make, dtype: torch.dtype
) -> None:
    experts = nn.ModuleList([nn.Linear(16, 16, bias=False, dtype=dtype) for _ in range(400)])
    model = nn.ModuleDict({NAME: nn.ModuleDict({NAME: experts})})
    optimizer = make(list(model.parameters()))
    memory = Memory()
    stager = Stager(
        TrainingState(model, optimizer, None), memory,
        generation=1, shard=0, num_shards=1, device=torch.device("cpu"),
    )  # fmt: skip

    def train_some(number: int, used: list[nn.Module]) -> None:
        losses: list[Tensor] = [expert(torch.ones(2, 16, dtype=dtype)).sum() for expert in used]
        torch.stack(losses).sum().backward()
        optimizer.step()
        stager.stage(number)

    train_some(0, list(experts)[:1])
    train_some(1, list(experts)[1:])
    header = parse_header(memory.file, "file")
    assert header.step == 1
    assert memory.requested == 1
    stepped = {name.rpartition(".")[0] for name in header.entries if name.startswith("optim.")}
    assert len(stepped) in (0, 400)


def test_an_optimizer_with_skipped_first_steps_has_reserved_space() -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    memory = Memory()
    stager = Stager(
        TrainingState(model, optimizer, None), memory,
        generation=1, shard=0, num_shards=1, device=torch.device("cpu"),
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    number = 0
    while not optimizer.state:
        scaler.scale(model(torch.ones(2, 300)).square().sum() * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stager.stage(number)
        number += 1
    assert number > 1
    assert len(parse_header(memory.file, "file").entries) == 8


def test_an_optimizer_without_state_gets_no_reserved_space() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, None)
    assert state.entries_to_come() != []
    train(model, optimizer, range(1))
    assert state.entries_to_come() == []


def test_no_space_is_reserved_if_all_parameters_have_state() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    state = TrainingState(model, optimizer, None)
    assert state.entries_to_come() == []
    frozen = nn.Linear(2, 2).requires_grad_(False)
    both = nn.ModuleList([model, frozen])
    optimizer.add_param_group({"params": list(frozen.parameters())})
    assert TrainingState(both, optimizer, None).entries_to_come() == []

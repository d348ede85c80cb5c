"""Several optimizers and wrappers of optimizers: all state is kept, or refused by name."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.layout import parse_header
from holdfast.workers.checkpoint.optimizer_state import WrongOptimizer
from holdfast.workers.checkpoint.restore import WrongModel
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from tests.unit.workers.checkpoint.fake_ranks import Memory, restore_alone, staged_alone


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Container(Optimizer):
    """Like torchtitan's OptimizersContainer: its own state is always empty."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = list(optimizers)
        both = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        super().__init__(both, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


class Accelerated(Optimizer):
    """Like accelerate's AcceleratedOptimizer: a subclass that does not call super().__init__."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Lookahead(Optimizer):
    """A wrapper with state of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state: Any = defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()


def first_and_second(model: nn.Sequential) -> tuple[Optimizer, Optimizer]:
    return AdamW(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.2, momentum=0.9)


GIVEN: dict[str, Callable[[nn.Sequential], Any]] = {
    "list": lambda m: list(first_and_second(m)),
    "tuple": first_and_second,
    "dict": lambda m: dict(zip(("matrices", "rest"), first_and_second(m), strict=True)),
    "container": lambda m: Container(*first_and_second(m)),
    "container-of-one": lambda m: Container(AdamW(m.parameters())),
    "accelerated": lambda m: Accelerated(AdamW(m.parameters(), lr=0.1)),
    "list-of-accelerated": lambda m: [Accelerated(one) for one in first_and_second(m)],
    "one-of-each-parameter": lambda m: [AdamW([p]) for p in m.parameters()],
}


def steps_of(given: Any) -> list[Optimizer]:
    if isinstance(given, dict):
        return list(given.values())
    return list(given) if isinstance(given, list | tuple) else [given]


def train(model: nn.Module, given: Any, steps: range) -> None:
    for number in steps:
        torch.manual_seed(number)
        model(torch.randn(5, 4)).square().mean().backward()
        for optimizer in steps_of(given):
            optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN.keys())
def test_all_optimizers_continue_unchanged(make: Callable[[nn.Sequential], Any]) -> None:
    model = net()
    optimizers = make(model)
    train(model, optimizers, range(3))
    for entry in TrainingState(model, optimizers, None).optimizers:
        entry.optimizer.param_groups[0]["lr"] = 0.05
    file = staged_alone(model, optimizers)
    again = net()
    restored = make(again)
    state = restore_alone(file, again, restored)
    assert {entry.optimizer.param_groups[0]["lr"] for entry in state.optimizers} == {0.05}
    train(model, optimizers, range(3, 6))
    train(again, restored, range(3, 6))
    for got, want in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_single_optimizer_has_the_names_of_earlier_files_however_it_is_given() -> None:
    names = []
    for make in (AdamW, lambda p: [AdamW(p)], lambda p: Accelerated(AdamW(p))):
        model = net()
        optimizers: Any = make(model.parameters())
        train(model, optimizers, range(1))
        header = parse_header(staged_alone(model, optimizers), "file")
        assert set(header.extra["optimizer"]) >= {"class", "groups", "scalars"}
        names.append(set(header.entries))
    assert "optim.0.weight.exp_avg" in names[0]
    assert names[0] == names[1] == names[2]


def test_a_second_optimizer_that_was_not_given_is_refused_at_its_first_step() -> None:
    model = net()
    first, second = first_and_second(model)
    state = TrainingState(model, first, None)
    with pytest.raises(UserError, match=r"a step of SGD over .*\(2.weight, 2.bias\).*\[first, sec"):
        train(model, [first, second], range(1))
    del state
    other = nn.Linear(4, 2)
    kept = TrainingState(model, [first, second], None)
    train(other, SGD(other.parameters(), lr=0.1), range(1))
    assert len(kept.optimizers) == 2


def test_the_end_of_a_state_during_a_step_disturbs_no_optimizer() -> None:
    """Garbage collection may run between two hooks of a step, which torch iterates over."""
    model, other = net(), net()
    optimizer = AdamW(model.parameters())
    states = [TrainingState(other, AdamW(other.parameters()), None)]
    states.append(TrainingState(model, optimizer, None))

    def end_the_first(*_: Any) -> None:
        del states[:1]
        gc.collect()

    hooks = (end_the_first, lambda *_: None)
    handles = [register_optimizer_step_pre_hook(hook) for hook in hooks]
    try:
        train(model, optimizer, range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert len(states) == 1


def test_an_optimizer_inside_one_that_is_no_known_wrapper_is_refused_at_its_step() -> None:
    class Sharpness(Optimizer):
        def __init__(self, base: Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()

    model = net()
    wrapper = Sharpness(AdamW(model.parameters()))
    state = TrainingState(model, wrapper, None)
    with pytest.raises(UserError, match="a step of AdamW over parameters of the model"):
        train(model, wrapper, range(1))
    del state


def test_an_optimizer_within_backward_is_refused_unless_it_is_given() -> None:
    model = net()
    _apply_optimizer_in_backward(AdamW, model.parameters(), {"lr": 0.1})
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"AdamW that runs within backward over .*0.weight"):
        TrainingState(model, optimizer, None)
    inner = [one for p in model.parameters() for one in p._in_backward_optimizers]  # type: ignore[attr-defined]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in inner:
        one.step()
    entries = parse_header(staged_alone(model, inner), "file").entries
    assert "optim.2:2.weight.exp_avg" in entries


def test_a_wrapper_with_state_of_its_own_is_refused() -> None:
    model = net()
    wrapper = Lookahead(AdamW(model.parameters()))
    train(model, wrapper, range(1))
    with pytest.raises(UserError, match="got a Lookahead with state of its own beside Ada"):
        staged_alone(model, wrapper)


def test_an_optimizer_that_divides_its_state_by_parameter_is_refused_by_name() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = net()
        divided = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW)
        with pytest.raises(UserError, match=r"got ZeroRedundancyOptimizer.*use fully_shard"):
            TrainingState(model, divided, None)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("given", [None, [], "adam", [None]], ids=repr)
def test_what_is_no_optimizer_is_refused_with_the_call_to_write(given: Any) -> None:
    with pytest.raises(UserError, match=r"expected a torch.optim.Optimizer.*s.restore\(model"):
        TrainingState(net(), given, None)


class HalfKept(AdamW):
    """Keeps the state of every other parameter, as an optimizer that divides them among ranks."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"][::2]:
                self.state.pop(parameter, None)
        return result


def test_state_of_only_some_stepped_parameters_is_refused_at_the_first_staging() -> None:
    model = net()
    optimizer = HalfKept(model.parameters())
    state = TrainingState(model, optimizer, None)
    train(model, optimizer, range(1))
    with pytest.raises(UserError, match=r"no state of 0.weight, 2.weight after a .*groups\[0\]"):
        state.export_extra()


def test_groups_may_differ_in_whether_they_have_state() -> None:
    model = net()
    optimizer = SGD(with_and_without_momentum(model), lr=0.1)
    state = TrainingState(model, optimizer, None)
    train(model, optimizer, range(2))
    assert state.export_extra()["optimizer"]["without"] == ["2.weight", "2.bias"]
    again = net()
    other = SGD(with_and_without_momentum(again), lr=0.5)
    restore_alone(staged_alone(model, optimizer), again, other)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]


def with_and_without_momentum(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].parameters()), "momentum": 0.9},
        {"params": list(model[2].parameters()), "momentum": 0.0},
    ]


def test_parameters_that_are_added_after_restore_are_refused() -> None:
    model = net()
    optimizer = AdamW(model[0].parameters())
    state = TrainingState(model, optimizer, None)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(UserError, match="got 4 parameters; expected 2 as at restore"):
        state.export_extra()


def test_state_of_no_parameter_is_refused() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    optimizer.state["calls"] = 3  # type: ignore[index,assignment]
    with pytest.raises(UserError, match=r"state\['calls'\], which is not of one of its parameters"):
        staged_alone(model, optimizer)


# -- at restore every optimizer is complete ---------------------------------------------------
def stored(make: Callable[[nn.Sequential], Any]) -> bytes:
    model = net()
    optimizers = make(model)
    train(model, optimizers, range(2))
    return staged_alone(model, optimizers)


@pytest.mark.parametrize(
    ("wrote", "reads", "message"),
    [
        pytest.param(
            lambda m: AdamW(m[0].parameters()), lambda m: AdamW(m.parameters()),
            r"written with param groups of \[2\] parameters; got \[4\]", id="fewer-parameters",
        ),
        pytest.param(
            lambda m: AdamW(m.parameters()), lambda m: SGD(m.parameters(), lr=0.1),
            "was written with AdamW; got SGD", id="another-class",
        ),
        pytest.param(
            lambda m: AdamW(m.parameters()),
            lambda m: AdamW([{"params": [p]} for p in m.parameters()]),
            r"groups of \[4\] parameters; got \[1, 1, 1, 1\]", id="other-groups",
        ),
        pytest.param(
            lambda m: AdamW(m.parameters()), lambda m: list(first_and_second(m)),
            "written with one optimizer; got the optimizers 0, 1", id="more-optimizers",
        ),
        pytest.param(
            lambda m: list(first_and_second(m)), lambda m: GIVEN["dict"](m),
            "the optimizers 0, 1; got the optimizers matrices, rest", id="other-names",
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_optimizers_is_refused(
    wrote: Callable[[nn.Sequential], Any], reads: Callable[[nn.Sequential], Any], message: str
) -> None:
    file = stored(wrote)
    model = net()
    with pytest.raises(WrongOptimizer, match=message):
        restore_alone(file, model, reads(model))


def test_parameters_of_another_optimizer_of_the_same_size_are_refused() -> None:
    file = stored(lambda m: AdamW([m[0].weight, m[0].bias]))
    model = net()
    with pytest.raises(WrongModel) as error:
        restore_alone(file, model, AdamW([model[0].weight, model[2].bias]))
    text = str(error.value)
    assert "missing from it (1): optim.2.bias" in text
    assert "that it does not have (3): optim.0.bias.exp_avg" in text


def test_a_parameter_without_a_gradient_so_far_is_complete_without_state() -> None:
    file = stored(lambda m: AdamW([*m.parameters()]))
    model = net()
    optimizer = AdamW(model.parameters())
    model[2].weight.grad = torch.ones_like(model[2].weight)
    optimizer.step()
    again = net()
    state = restore_alone(staged_alone(model, optimizer), again, AdamW(again.parameters()))
    assert [bool(state.optimizer.state.get(p)) for p in again.parameters()] == [
        False, False, True, False,
    ]  # fmt: skip
    assert file


def test_a_tensor_as_hyperparameter_must_be_a_number() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    optimizer.param_groups[0]["mask"] = torch.ones(3)
    with pytest.raises(UserError, match=r"param_groups\[0\]\['mask'\]: got a tensor of shape \(3,"):
        staged_alone(model, optimizer)


def test_steps_of_every_optimizer_wait_for_the_copy() -> None:
    model = net()
    optimizers = list(first_and_second(model))
    state, calls = TrainingState(model, optimizers, None), []
    state.before_each_step(lambda: calls.append(1))
    train(model, optimizers, range(2))
    assert len(calls) == 4
    memory = Memory()
    Stager(
        state, memory, generation=1, shard=0, num_shards=1, device=torch.device("cpu")
    ).stage(1)  # fmt: skip
    assert len(parse_header(memory.file, "file").entries) == 4 + 2 * 3 + 2


def moments(optimizer: Optimizer) -> list[Tensor]:
    return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


def test_a_parameter_that_two_optimizers_step_has_state_of_both() -> None:
    model = net()
    both = {"a": AdamW(model.parameters()), "b": SGD(model.parameters(), lr=0.1, momentum=0.5)}
    train(model, both, range(2))
    again = net()
    other = {"a": AdamW(again.parameters()), "b": SGD(again.parameters(), lr=0.1, momentum=0.5)}
    restore_alone(staged_alone(model, both), again, other)
    for name, optimizer in both.items():
        pairs = zip(moments(other[name]), moments(optimizer), strict=True)
        assert all(torch.equal(got, want) for got, want in pairs)

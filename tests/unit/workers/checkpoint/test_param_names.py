"""Names of tensors are those of the model, however it is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.param_names import ParamNames
from holdfast.workers.checkpoint.restore import WrongModel
from tests.unit.workers.checkpoint.fake_ranks import restore_alone, staged_alone


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


class OwnModule(nn.Module):
    """A model whose own child has the name that DDP gives to its."""

    def __init__(self, weight: bool = True) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        if weight:
            self.weight = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def parts() -> nn.ModuleDict:
    return nn.ModuleDict({"gen": Net(), "disc": Net()})


WRAPPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "DDP": DistributedDataParallel,
    "compile": torch.compile,
    "compile-of-DDP": lambda m: torch.compile(DistributedDataParallel(m)),
    "DDP-of-compile": lambda m: DistributedDataParallel(torch.compile(m)),
    "compile-of-DDP-of-compile": lambda m: torch.compile(DistributedDataParallel(torch.compile(m))),
    "DataParallel": DataParallel,
    "checkpoint": checkpoint_wrapper,
    "DDP-of-checkpoint": lambda m: DistributedDataParallel(checkpoint_wrapper(m)),
}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names(model: nn.Module) -> list[str]:
    found = ParamNames(model)
    return [*found.parameters, *found.buffers]


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
@pytest.mark.parametrize("build", [Net, OwnModule, parts])
def test_names_do_not_depend_on_wrappers(
    wrap: Callable[[nn.Module], nn.Module], build: Callable[[], nn.Module]
) -> None:
    plain = build()
    expected = [*dict(plain.named_parameters()), *dict(plain.named_buffers())]
    assert names(plain) == expected
    assert names(wrap(plain)) == expected


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_names_do_not_depend_on_wrappers_of_submodules(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    wrapped = nn.ModuleDict({name: wrap(part) for name, part in parts().items()})
    assert names(wrapped) == names(parts())


def test_a_parameter_that_two_modules_share_is_named_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert names(model) == list(dict(model.named_parameters()))


def test_two_tensors_of_one_name_are_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    model._orig_mod = nn.Linear(2, 2, bias=False)
    with pytest.raises(UserError, match="got two tensors named weight"):
        staged_alone(model, torch.optim.SGD(model.parameters(), lr=0.1))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Values of all state that tell which tensor it is of."""
    optimizer = torch.optim.AdamW(model.parameters())
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(index + 1))
        nn.init.constant_(parameter, float(index))
    optimizer.step()
    return optimizer


def test_a_file_with_both_names_belongs_to_another_model() -> None:
    both, single = OwnModule(), nn.Linear(2, 2, bias=False)
    file = staged_alone(both, trained(both))
    with pytest.raises(WrongModel, match=r"not in the model \(1\): module.weight"):
        restore_alone(file, single, torch.optim.AdamW(single.parameters()))


def test_any_wrapping_restores_what_any_other_staged() -> None:
    for wrap in WRAPPINGS.values():
        staged = wrap(Net())
        file = staged_alone(staged, trained(staged))
        model = torch.compile(DistributedDataParallel(Net()))
        restore_alone(file, model, torch.optim.AdamW(model.parameters()))
        for got, want in zip(model.parameters(), staged.parameters(), strict=True):
            assert torch.equal(got, want)

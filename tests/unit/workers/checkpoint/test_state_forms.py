"""Optimizer state of other shapes than its parameter, and tensors that are no plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from tests.unit.workers.checkpoint.fake_ranks import (
    Memory,
    Net,
    ShardInBytes,
    as_rank,
    build,
    restore_alone,
    staged_alone,
    step,
)

aten = torch.ops.aten


class Stateful(torch.optim.Optimizer):
    """Keeps what `make` gives for each parameter."""

    def __init__(self, parameters: Any, make: Callable[[Tensor, int], dict[str, Any]]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.make = make

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    number = self.state[parameter].get("step", 0) + 1
                    self.state[parameter].update(self.make(parameter, number), step=number)


@torch.no_grad()
def rows(parameter: Tensor, number: int) -> dict[str, Any]:
    """Like NorMuon's second moment: one number of each row, sharded like the parameter."""
    if parameter.ndim < 2:
        return {"whole": parameter.detach() * number}
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    row = local.square().mean(-1, keepdim=True) * number
    if isinstance(parameter, DTensor):
        row = DTensor.from_local(
            row, parameter.device_mesh, parameter.placements, run_check=False,
            shape=torch.Size((parameter.shape[0], 1)), stride=(1, 1),
        )  # fmt: skip
    return {"row": row}


@torch.no_grad()
def columns(parameter: Tensor, number: int) -> dict[str, Any]:
    """Like Dion's factor: a matrix of its own shape, a copy on every rank."""
    if isinstance(parameter, DTensor):
        full = [Replicate()] * parameter.device_mesh.ndim
        shape = (parameter.shape[-1], 2)
        return {
            "factor": DTensor.from_local(
                torch.full(shape, float(number)), parameter.device_mesh, full, run_check=False
            )
        }
    return {"factor": torch.full((parameter.shape[-1], 2), float(number))}


def local_state(parameter: Tensor, number: int) -> dict[str, Any]:
    """Like an optimizer that works on each rank's part as a plain tensor."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return {"moment": local.detach() * number}


MAKES = {"rows": rows, "columns": columns, "local": local_state}


def trained(replicate: int, shard: int, make: Any) -> tuple[Net, torch.optim.Optimizer]:
    model, _ = build(replicate, shard, seed=1)
    optimizer = Stateful(model.parameters(), make)
    step(model, optimizer, seed=100)
    return model, optimizer


def files_of(replicate: int, shard: int, make: Any) -> dict[int, bytes]:
    files = {}
    for rank in range(shard):
        with as_rank(rank, replicate * shard):
            model, optimizer = trained(replicate, shard, make)
            memory = Memory()
            Stager(
                TrainingState(model, optimizer, None), memory,
                generation=1, shard=rank, num_shards=shard, device=torch.device("cpu"),
            ).stage(0)  # fmt: skip
            files[rank] = memory.file
    return files


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
@pytest.mark.parametrize(
    ("old", "new"),
    [((1, 2), (1, 2)), ((1, 2), (2, 3)), ((2, 3), (1, 2)), ((1, 2), (1, 1))],
    ids=lambda mesh: f"{mesh[0]}x{mesh[1]}",
)
def test_sharded_state_of_other_shapes_is_restored_on_any_mesh(
    make: Any, old: tuple[int, int], new: tuple[int, int]
) -> None:
    files = files_of(*old, make)
    for rank in range(new[1]):
        with as_rank(rank, new[0] * new[1]):
            _, wanted = trained(*new, make)
            model, _ = build(*new, seed=2)
            optimizer = Stateful(model.parameters(), make)
            state = TrainingState(model, optimizer, None)
            extra = restore(
                state, lambda k: ShardInBytes(files[k], f"shard {k}"),
                shard=rank, num_shards=new[1], num_stored=old[1], step=0,
            )  # fmt: skip
            state.import_extra(extra)
            pairs = zip(optimizer.state.values(), wanted.state.values(), strict=True)
            for got, want in pairs:
                assert got.keys() == want.keys() and got["step"] == 1
                for key, value in want.items():
                    if isinstance(value, Tensor):
                        same_value(got[key], value)


def same_value(got: Tensor, want: Tensor) -> None:
    assert type(got) is type(want) and got.shape == want.shape
    if isinstance(got, DTensor) and isinstance(want, DTensor):
        assert got.placements == want.placements
        got, want = got._local_tensor, want._local_tensor
    assert torch.equal(got, want)


def test_row_statistics_of_a_sharded_parameter_have_their_own_box() -> None:
    with as_rank(0, 2):
        model, _ = build(1, 2, seed=1)
        optimizer = Stateful(model.parameters(), rows)
        step(model, optimizer, seed=1)
        held = {h.name: h for h in TrainingState(model, optimizer, None).tensors()}
        box = held["optim.first.weight.row"].box
    assert (box.global_shape, box.shape) == ((7, 1), (4, 1))


def test_whole_plain_state_of_a_sharded_parameter_is_refused() -> None:
    def whole(parameter: Tensor, number: int) -> dict[str, Any]:
        return {"moment": torch.zeros(parameter.shape)}

    with as_rank(0, 2):
        model, optimizer = trained(1, 2, whole)
        with pytest.raises(UserError, match=r"first.weight.moment: got shape \(7, 3\); expected"):
            staged_alone(model, optimizer)


class Wrapped(Tensor):
    """A wrapper subclass with one inner tensor, as float8 training makes of weights."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        def bare(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapped) else x

        out = func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        kept = (aten.detach.default, aten.view.default, aten.clone.default)
        return cls(out) if func in kept else out


class Halves(Wrapped):
    """One whose values are in several tensors, as those of low-bit types."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scale"], None


def with_weight(kind: Callable[[Tensor], Tensor], value: float) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(kind(torch.full((3, 2), value)))
    return model


def test_a_weight_in_a_wrapper_of_one_tensor_is_kept_in_it() -> None:
    model, again = with_weight(Wrapped, 2.0), with_weight(Wrapped, 0.0)
    file = staged_alone(model, torch.optim.SGD(model.parameters(), lr=0.1))
    restore_alone(file, again, torch.optim.SGD(again.parameters(), lr=0.1))
    weight: Any = again.weight
    assert isinstance(weight.data, Wrapped)
    assert torch.equal(weight.data.inner, torch.full((3, 2), 2.0))


def test_a_weight_in_several_tensors_is_refused_by_name() -> None:
    model = with_weight(Halves, 2.0)
    with pytest.raises(UserError, match=r"weight: got a Halves, a subclass of torch.Tensor that"):
        TrainingState(model, torch.optim.SGD(model.parameters()), None).expect_storable()


FORMATS = (
    torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_format_of_safetensors_is_kept_to_the_bit(dtype: torch.dtype) -> None:
    """Other shards copy parts of it to the bit, too."""
    bits = (torch.arange(64, dtype=torch.uint8) * 4 + 3).view(dtype).reshape(4, -1)

    def sharded(num: int, values: Tensor) -> nn.Module:
        model = nn.Module()
        mesh = init_device_mesh("cpu", (num,))
        local = values.chunk(num)[0].clone()
        model.odd = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]), requires_grad=False)
        model.plain = nn.Parameter(torch.zeros(1))
        model.register_buffer("whole", values.clone())
        return model

    files, got = {}, torch.empty(0)
    for rank in range(2):
        with as_rank(rank, 2):
            model = sharded(2, bits if rank == 0 else bits.view(torch.uint8).flip(0).view(dtype))
            memory = Memory()
            state = TrainingState(model, torch.optim.SGD([model.plain]), None)
            Stager(
                state, memory, generation=1, shard=rank, num_shards=2, device=torch.device("cpu")
            ).stage(0)
            files[rank] = memory.file
    with as_rank(0, 1):
        again = sharded(1, torch.zeros_like(bits.view(torch.uint8)).view(dtype))
        restore(
            TrainingState(again, torch.optim.SGD([again.plain]), None),
            lambda k: ShardInBytes(files[k], f"shard {k}"),
            shard=0, num_shards=1, num_stored=2, step=0,
        )  # fmt: skip
        got = again.odd.to_local()
    raw = bits.view(torch.uint8)
    want = torch.cat([raw[:2], raw.flip(0)[:2]])
    assert torch.equal(got.view(torch.uint8), want)
    assert torch.equal(again.whole.view(torch.uint8), raw)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_another_format_is_rejected_at_restore_with_the_name_of_its_tensor(dtype: Any) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("odd", torch.zeros(2, dtype=dtype))
    with pytest.raises(UserError, match=f"model.odd: got a tensor of {dtype}; expected one of"):
        TrainingState(model, torch.optim.SGD(model.parameters()), None).expect_storable()


@pytest.mark.parametrize("kind", [Wrapped, Halves])
def test_optimizer_state_that_would_come_back_as_a_plain_tensor_is_refused(kind: Any) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = kind(torch.zeros(2, 2))
    with pytest.raises(UserError, match=r"optim.weight.exp_avg: got a \w+, a subclass of torch"):
        staged_alone(model, optimizer)

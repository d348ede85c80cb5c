"""Bytes that a block keeps for its backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as partitioner
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.orchestrator.api.v1alpha1.parallelism import ActivationCheckpointing
from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.workers.training.models.transformer import Block
from holdfast.workers.training.parallel.activations import checkpoint_blocks

ANGLES = torch.ones(64, 16), torch.zeros(64, 16)


def model_of(settings: dict[str, Any], num: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(Model(dim=32, num_heads=2)) for _ in range(num)))
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.1)
    checked = ActivationCheckpointing.model_validate(settings)
    checkpoint_blocks(blocks, list(blocks), checked)
    return blocks


class Counting(TorchDispatchMode):
    """Counts the operations that are really run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found[operation.name()] += 1
        return operation(*args, **(kwargs or {}))


def kept(forward: Callable[[], Tensor]) -> int:
    """Bytes that are kept between forward and backward, of tensors that are no parameters."""
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(found.values())


def gradients(blocks: nn.Sequential) -> list[Tensor]:
    x = torch.linspace(-1, 1, 64 * 32).view(1, 64, 32)
    for block in blocks:
        x = block(x, *ANGLES)
    x.square().mean().backward()
    return [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("keep", [["matmul", "attention"], ["matmul"], ["attention"]])
def test_selective_recomputation_gives_the_same_gradients(keep: list[str]) -> None:
    expected = gradients(model_of({}))
    found = gradients(model_of({"selective": {"keep": keep}}))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_selective_recomputation_runs_the_kept_operations_once() -> None:
    def num_operations(settings: dict[str, Any]) -> dict[str, int]:
        with Counting() as counting:
            gradients(model_of(settings))
        attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
        return {"matmul": counting.found["aten::mm"], "attention": counting.found[attention]}

    none, full = num_operations({}), num_operations({"full": {}})
    # Nothing needs the output of the last matrix of a block.
    assert full == {"matmul": none["matmul"] + 6, "attention": none["attention"] + 1}
    for keep in ("matmul", "attention"):
        found = num_operations({"selective": {"keep": [keep]}})
        assert found[keep] == none[keep]
    assert num_operations({"selective": {}}) == none


def test_every_nth_block_only_is_recomputed() -> None:
    blocks = model_of({"selective": {"everyNthBlock": 2}}, num=4)
    assert [hasattr(block, "_checkpoint_wrapped_module") for block in blocks] == [False, True] * 2


@pytest.fixture
def budget() -> Iterator[None]:
    before = partitioner.activation_memory_budget
    yield
    partitioner.activation_memory_budget = before
    torch.compiler.reset()


@pytest.mark.usefixtures("budget")
def test_a_compiled_block_keeps_less_with_a_smaller_budget() -> None:
    x = torch.ones(1, 64, 32, requires_grad=True)
    sizes = []
    for share in (1.0, 0.1):
        torch.compiler.reset()
        (block,) = model_of({"budget": share})
        block.compile(backend="aot_eager_decomp_partition")
        sizes.append(kept(lambda block=block: block(x, *ANGLES)))
    assert 0 < sizes[1] < sizes[0] / 2

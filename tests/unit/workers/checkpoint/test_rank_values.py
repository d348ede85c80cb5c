"""State of a rank's own objects comes back as it was, or is refused by name."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint.rank_values import access, decode, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.sampled_from(["__blob__", "__tuple__"]), inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_each_value_comes_back_with_its_types(value: Any) -> None:
    assert repr(decode(encode({"x": value}))["x"]) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6, dtype=torch.int16).view(2, 3).t(), torch.tensor(1.5), torch.empty(0, 3),
        torch.tensor([True, False]), torch.tensor([1.5], dtype=torch.bfloat16),
    ],
    ids=lambda v: f"{v.dtype}{list(v.shape)}",
)  # fmt: skip
def test_tensors_come_back_with_shape_and_type(value: torch.Tensor) -> None:
    got = decode(encode({"x": {"deep": [value, b"between"]}}))["x"]["deep"][0]
    assert got.dtype == value.dtype and torch.equal(got, value)


def test_arrays_and_numbers_of_numpy_come_back() -> None:
    held = {"a": np.arange(4, dtype=">u2").reshape(2, 2), "n": np.int64(-3), "f": np.float32(0.5)}
    got = decode(encode({"x": held}))["x"]
    assert np.array_equal(got["a"], held["a"]) and got["a"].dtype == held["a"].dtype
    assert got["n"] == -3 and type(got["n"]) is np.int64 and type(got["f"]) is np.float32
    got["a"][0, 0] = 7  # as the object that gets it may write it


@pytest.mark.parametrize(
    ("value", "what"),
    [({1, 2}, "set"), (object(), "object"), (np.array([object()]), "ndarray of object")],
)
def test_a_value_without_a_form_is_refused_with_the_name_of_its_object(
    value: Any, what: str
) -> None:
    with pytest.raises(UserError, match=rf"per_rank\['loader'\]: got {what} in its state"):
        encode({"fine": 1, "loader": {"deep": [value]}})


class Seen:
    """An object with state_dict, whose state may be any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def generator_of_torch() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (generator_of_torch, lambda g: torch.rand(3, generator=g).tolist()),
        (lambda: np.random.default_rng(3), lambda g: g.random(3).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.random(3).tolist()),
        (lambda: np.random.RandomState(3), lambda g: g.random(3).tolist()),
        (lambda: random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
        (lambda: random, lambda g: [g.random(), g.gauss(0, 1)]),
        (lambda: Seen(Counter("aab")), lambda g: g.value.most_common()),
        (lambda: {"seen": math.inf}, lambda g: dict(g)),
    ],
    ids=["torch", "numpy", "mt19937", "legacy", "random", "module", "state-dict", "dict"],
)
def test_a_generator_continues_where_its_state_was_read(make: Any, draw: Any) -> None:
    one = make()
    draw(one)
    data = encode({"rng": access("rng", one).read()})
    expected = draw(one)
    other = make()
    access("rng", other).write(decode(data)["rng"])
    assert draw(other) == expected


def test_an_object_without_state_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"got list as per_rank\['mine'\]; expected an object with"):
        access("mine", [1])

"""The optimizers that a script gives to `restore`: one, several, or a wrapper of others. Finds
those that hold the state, and rejects what would leave state behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.orchestrator.errors import UserError, few

Given = Any
"""A torch.optim.Optimizer, a wrapper of one, or a list, tuple or mapping of them."""

SEPARATOR = ":"
"""Separator of optimizer's and parameter's name in a checkpoint with several optimizers."""

_DIVIDED = {
    "ZeroRedundancyOptimizer": "use fully_shard, which divides parameters and optimizer state",
    "ZeROOptimizer": "use fully_shard instead of DeepSpeed's ZeRO",
}
"""Classes that keep on each rank the state of some parameters only, without a word which."""


def leaves(given: Given) -> dict[str, Any]:
    """Name -> each optimizer that holds state; the name of a single one is empty.

    torchtitan's container has `optimizers`, accelerate's wrapper has `optimizer`. Raises UserError.
    """
    optimizers: dict[str, Any] = {}
    seen: set[int] = set()
    for path, optimizer in _walk(given, ""):
        if id(optimizer) not in seen:
            seen.add(id(optimizer))
            optimizers[path] = optimizer
    if not optimizers:
        raise _not_an_optimizer(given, "")
    return {"": next(iter(optimizers.values()))} if len(optimizers) == 1 else optimizers


def wrappers(given: Given) -> Iterator[tuple[Any, list[Any]]]:
    """Each wrapper among the given, with the optimizers that it has."""
    inner = _inner(given)
    if inner is None:
        return
    if not isinstance(given, Mapping | list | tuple):
        yield given, [optimizer for _, optimizer in _walk(inner, "")]
    for part in inner.values():
        yield from wrappers(part)


def expect_stateless(wrapper: Any, inner: Iterable[Any]) -> None:
    """Raises UserError if a wrapper has state of its own, such as Lookahead's slow weights."""
    own = getattr(wrapper, "state", None)
    states = [optimizer.state for optimizer in inner]
    if not own or any(own is state for state in states):
        return
    if any(value and all(s.get(key) is not value for s in states) for key, value in own.items()):
        raise UserError(
            f"optimizer: got a {type(wrapper).__name__} with state of its own beside "
            f"{', '.join(type(o).__name__ for o in inner)}; expected a wrapper without state; "
            "make it a subclass of the optimizer, so that one object has the whole state"
        )


class OnlyThese:
    """Guard of optimizers: while it lives, a step of one that was not given to restore raises
    UserError if it has parameters of the model: its state would be in no checkpoint."""

    def __init__(self, known: Mapping[str, Any], given: Given, names: Mapping[int, str]) -> None:
        """`names`: the parameters' names, by id."""
        self._allowed = {id(optimizer) for optimizer in known.values()}
        self._allowed |= {id(wrapper) for wrapper, _ in wrappers(given)}
        self._names = names
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        if not _guards:
            register_optimizer_step_pre_hook(_check_all)
        _guards[:] = [guard for guard in _guards if guard() is not None] + [weakref.ref(self)]

    def check(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._allowed or optimizer in self._others:
            return
        inside = _inner(optimizer)
        if inside and all(id(wrapped) in self._allowed for _, wrapped in _walk(inside, "")):
            self._others.add(optimizer)
            return
        stepped = [
            self._names[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._names
        ]
        if stepped:
            raise _not_given(type(optimizer).__name__, stepped)
        self._others.add(optimizer)


_guards: list[weakref.ref[OnlyThese]] = []
"""One hook serves all, and stays: torch iterates over its hooks while garbage collection may end a
guard."""


def _check_all(optimizer: Optimizer, *_: Any) -> None:
    for reference in _guards:
        guard = reference()
        if guard is not None:
            guard.check(optimizer)


def expect_in_backward_given(parameters: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Optimizers that torch runs within backward stand at the parameters."""
    ids = {id(optimizer) for optimizer in known.values()}
    for name, parameter in parameters.items():
        for in_backward in getattr(parameter, "_in_backward_optimizers", ()):
            if id(in_backward) not in ids:
                raise _not_given(f"{type(in_backward).__name__} that runs within backward", [name])


def expect_hooks(optimizer: Any) -> Callable[..., Any]:
    """Get its register_step_pre_hook. UserError for a look-alike of torch's optimizers."""
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"optimizer: got {type(optimizer).__name__}, which is not a torch.optim.Optimizer; "
            "expected one whose steps can wait for the copy of the state on a GPU; make it a "
            "subclass of torch.optim.Optimizer"
        )
    return optimizer.register_step_pre_hook


def _walk(given: Given, path: str) -> Iterator[tuple[str, Any]]:
    for kind in type(given).__mro__:
        if kind.__name__ in _DIVIDED:
            raise UserError(
                f"optimizer: got {type(given).__name__}, whose state is divided among the ranks by "
                f"parameter; expected the same optimizer state on every rank with the same part "
                f"of the model; {_DIVIDED[kind.__name__]}"
            )
    inner = _inner(given)
    if inner is None:
        if not (hasattr(given, "param_groups") and hasattr(given, "state")):
            raise _not_an_optimizer(given, path)
        yield path, given
        return
    alone = len(inner) == 1 and not isinstance(given, Mapping)
    for name, part in inner.items():
        yield from _walk(part, path if alone else f"{path}/{name}" if path else str(name))


def _inner(given: Given) -> dict[Any, Any] | None:
    """The optimizers inside by key; None: it is not a wrapper."""
    if isinstance(given, Mapping):
        for name in given:
            if SEPARATOR in str(name):
                raise UserError(
                    f"optimizer: got the name {name!r}; expected one without {SEPARATOR!r}; "
                    "rename it"
                )
        return dict(given)
    if isinstance(given, list | tuple):
        return dict(enumerate(given))
    several = getattr(given, "optimizers", None)
    if isinstance(several, Mapping | list | tuple) and several:
        return dict(several) if isinstance(several, Mapping) else dict(enumerate(several))
    optimizer = getattr(given, "optimizer", None)
    if hasattr(optimizer, "param_groups") and hasattr(given, "param_groups"):
        return {0: optimizer}
    return None


def _not_an_optimizer(given: Given, path: str) -> UserError:
    where = f" at {path}" if path else ""
    return UserError(
        f"session.restore: got {type(given).__name__}{where} as optimizer; expected a "
        "torch.optim.Optimizer, or a list, tuple or dict of them; write s.restore(model, optimizer)"
    )


def _not_given(kind: str, names: list[str]) -> UserError:
    return UserError(
        f"optimizer: got a step of {kind} over parameters of the model ({few(names)}) that was not "
        "given to restore, so no checkpoint has its state; expected all optimizers; write "
        "s.restore(model, [first, second])"
    )

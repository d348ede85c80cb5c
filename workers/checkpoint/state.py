"""The training state of a model and its optimizers: named tensors with their boxes in the global
tensors, and the values that are not tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from holdfast.orchestrator.errors import UserError, few

from . import extra_state, given_optimizers, module_state
from .extra_state import Extra as Extra
from .given_optimizers import Given
from .layout import MODEL, MODULES, Box, Entry
from .optimizer_state import OptimizerState, WrongOptimizer
from .param_names import ParamNames
from .placement import refuse_fsdp1
from .rank_state import EXTRA_KEY, RankState
from .tensors import StateTensor, address_of, box_of, memory_of, storage_type
from .tensors import local_of as local_of

_POSITIONS = "data"
_MAX_NAMED = 5
"""Settings in one message."""


def say_once(what: str) -> None:
    """Prints it on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"holdfast: {what}", file=sys.stderr)


class StagePart(NamedTuple):
    """One stage, as the ranks of a pipeline exchange it before a restore."""

    names: list[str]
    """Names of parameters, buffers and modules with state."""
    sizes: dict[str, list[int]]
    """Optimizer -> number of parameters in each of its groups."""


class TrainingState:
    """All state of one rank. Must be made while the parameters are sharded, before any step.

    Raises UserError if an optimizer has parameters that the model does not have, if two tensors of
    the model have one name, and for state that no checkpoint would have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Given,
        extra: Extra,
        rank_state: RankState | None = None,
        say: Callable[[str], None] = say_once,
        positions: Sequence[extra_state.Stateful] = (),
        keep: Literal["all", "trainable"] = "all",
    ) -> None:
        """`say` gets what is not restored, and what is without a counterpart. `positions` in data
        are stored with `extra`, in this order. With `keep` trainable, frozen parameters are not
        part of the state."""
        self.model = model
        self.given, self.extra, self.rank_state = optimizer, extra, rank_state
        self._say, self._positions = say, positions
        self._stored_positions: list[dict[str, Any]] | None = None
        """Positions in the checkpoint that was restored."""
        self._in_script = extra_state.settings_of(extra)
        # FSDP2 replaces a module's parameters while they are gathered; these objects are the
        # sharded ones.
        self._names = ParamNames(model)
        refuse_fsdp1(model)
        everything = self._names.parameters
        self.left_out = {
            name: p for name, p in everything.items() if keep != "all" and not p.requires_grad
        }
        """Parameters that checkpoints do not have."""
        self.parameters = {n: p for n, p in everything.items() if n not in self.left_out}
        """Name -> parameter."""
        self._boxes: dict[str, Box] = {}
        self._elsewhere: set[str] = set()
        optimizers = given_optimizers.leaves(optimizer)
        self.optimizers = [
            OptimizerState(name, leaf, everything, self._box) for name, leaf in optimizers.items()
        ]
        self.optimizer = self.optimizers[0].optimizer
        """The first or only one."""
        self._wrappers = list(given_optimizers.wrappers(optimizer))
        given_optimizers.expect_in_backward_given(everything, optimizers)
        names = {id(p): name for name, p in everything.items()}
        for state in self.optimizers:
            names |= {id(p): name for name, p in state.stepped.items()}
        self._guard = given_optimizers.OnlyThese(optimizers, optimizer, names)

    # -- stages of a pipeline -------------------------------------------------------------------
    def stage_part(self) -> StagePart:
        sizes = {optimizer.name: optimizer.sizes for optimizer in self.optimizers}
        names = [*self.parameters, *self._names.buffers, *self._names.modules]
        return StagePart(names, sizes)

    def join_stages(self, parts: Sequence[StagePart]) -> None:
        """Take the parts of all stages, this one included. The groups of an optimizer are compared
        over all stages, since each has other parameters. Raises UserError if the stages have not
        the same groups."""
        self._elsewhere = {n for part in parts for n in part.names} - set(self.stage_part().names)
        for optimizer in self.optimizers:
            sizes = [part.sizes.get(optimizer.name, []) for part in parts]
            if len({len(groups) for groups in sizes}) != 1:
                raise UserError(
                    f"session.restore: got param groups of {sizes} parameters on the stages of the "
                    "pipeline; expected the same number of groups on each, as checkpoints are "
                    "restored to other stages; give every stage all groups, some of them empty"
                )
            optimizer.total_sizes = [sum(group) for group in zip(*sizes, strict=True)]

    def of_other_stage(self, entry: str) -> bool:
        """True if an entry of a file is of a tensor that another stage has."""
        if entry.startswith(MODEL):
            return entry.removeprefix(MODEL) in self._elsewhere
        return any(
            optimizer.owner(entry) in self._elsewhere
            for optimizer in self.optimizers
            if entry.startswith(optimizer.prefix)
        )

    # -- export ---------------------------------------------------------------------------------
    def model_tensors(self) -> Iterator[StateTensor]:
        for name, parameter in self.parameters.items():
            local = memory_of(MODEL + name, parameter)
            yield StateTensor(MODEL + name, local, self._box(name, parameter), parameter)
        for name, (module, key) in self._names.buffers.items():
            buffer = module._buffers[key]
            if buffer is not None:
                local = memory_of(MODEL + name, buffer)
                yield StateTensor(MODEL + name, local, box_of(buffer), buffer)

    def expect_storable(self) -> None:
        """Raises UserError for what is in the model or `extra` now and cannot be stored."""
        for held in self.model_tensors():
            storage_type(held.name, held.local.dtype)
        module_state.export(self._names.modules)
        extra_state.export_user(self.extra, {})

    def buffers(self) -> frozenset[str]:
        """Names of the tensors that a forward may write, such as batch norm statistics."""
        return frozenset(MODEL + name for name in self._names.buffers)

    def tensors(self) -> Iterator[StateTensor]:
        """All tensors; the order is fixed as long as the set of names is.

        Raises UserError for optimizer state that could not be restored.
        """
        yield from self.model_tensors()
        for optimizer in self.optimizers:
            yield from optimizer.tensors()
        if self.rank_state is not None:
            yield from self.rank_state.tensors()

    @property
    def has_full_size(self) -> bool:
        """True if all optimizers already have state, and the size of the ranks' own is known."""
        own = self.rank_state is None or self.rank_state.has_room
        return own and all(optimizer.optimizer.state for optimizer in self.optimizers)

    def collect(self, step: int) -> None:
        """Reads the state of this rank's own objects, to be staged with `step`. Collective among
        the ranks with this shard."""
        if self.rank_state is not None:
            self.rank_state.collect(step)

    def addresses(self) -> list[int]:
        """Addresses of all tensors, in the order of `tensors`: a cheap check whether one has
        moved."""
        out = [address_of(parameter) for parameter in self.parameters.values()]
        for module, key in self._names.buffers.values():
            buffer = module._buffers[key]
            if buffer is not None:
                out.append(address_of(buffer))
        for optimizer in self.optimizers:
            out += optimizer.addresses()
        own = self.rank_state.tensors() if self.rank_state is not None else ()
        return [*out, *(address_of(held.local) for held in own)]

    def _box(self, name: str, parameter: Tensor) -> Box:
        """The same as box_of, cached: it is slow for a DTensor, and does not change for a
        parameter."""
        box = self._boxes.get(name)
        if box is None:
            box = self._boxes[name] = box_of(parameter)
        return box

    def entries_to_come(self) -> list[Entry]:
        """Upper estimate of the state that the optimizers will add."""
        return [entry for optimizer in self.optimizers for entry in optimizer.entries_to_come()]

    def before_each_step(self, hook: Callable[[], None]) -> None:
        """Calls `hook` before a step of any of the optimizers. Raises UserError for one without
        hooks."""
        for optimizer in self.optimizers:
            given_optimizers.expect_hooks(optimizer.optimizer)(lambda *_: hook())

    @property
    def lacks_schedule(self) -> bool:
        """True if a schedule of torch sets a learning rate, and `extra` has none."""
        groups = (group for named in self.optimizers for group in named.optimizer.param_groups)
        return any("initial_lr" in g for g in groups) and not extra_state.schedules_in(self.extra)

    def export_extra(self, *, in_full: bool = False) -> dict[str, Any]:
        """State that is not a tensor, as JSON values. Raises UserError for an unsupported value,
        and for an optimizer that lacks state of some parameters.

        `in_full` also counts the parameters of `entries_to_come`, to know the final size.
        """
        for wrapper, inner in self._wrappers:
            given_optimizers.expect_stateless(wrapper, inner)
        if trained := [name for name, p in self.left_out.items() if p.requires_grad]:
            raise UserError(
                f"session.restore: got {trained[0]}, which is trained now and was frozen then, "
                "with keep='trainable'; expected it to stay frozen, as no checkpoint has it; "
                "unfreeze it before restore"
            )
        exported = {o.name: o.export(in_full=in_full) for o in self.optimizers}
        single = exported.get("")
        of_optimizers = {"optimizers": exported} if single is None else {"optimizer": single}
        own: dict[str, Any] = {}
        if self.rank_state is not None:
            own[EXTRA_KEY] = self.rank_state.describe()
        user = extra_state.export_user(self.extra, self._in_script)
        if self._positions:
            own[_POSITIONS] = [position.state_dict() for position in self._positions]
        return {**of_optimizers, **user, **module_state.export(self._names.modules), **own}

    # -- import ---------------------------------------------------------------------------------
    def expect_optimizers(self, extra: Mapping[str, Any]) -> None:
        """Raises WrongOptimizer if a file with this `extra` was written with other optimizers."""
        stored = _stored_optimizers(extra)
        if not stored:
            return
        here = [optimizer.name for optimizer in self.optimizers]
        if sorted(stored) != sorted(here):
            raise WrongOptimizer(
                f"session.restore: the checkpoint was written with {_listed(stored)}; got "
                f"{_listed(here)}; give the optimizers of the run that wrote it, in the same order "
                "or with the same names, or use another checkpoint path"
            )
        for state in self.optimizers:
            state.expect_stored(stored[state.name])

    def missing_optimizer_state(self, extra: Mapping[str, Any], found: set[str]) -> list[str]:
        """Entries that the file should have beside `found`, for optimizers to be complete."""
        stored = _stored_optimizers(extra)
        return [
            o.prefix + name
            for o in self.optimizers
            for name in o.missing(stored.get(o.name, {}), self._of(o, found))
        ]

    def _of(self, one: OptimizerState, entries: set[str]) -> set[str]:
        return {entry for entry in entries if entry.startswith(one.prefix)}

    def import_extra(self, extra: Mapping[str, Any]) -> None:
        """Restores the result of export_extra."""
        self.expect_optimizers(extra)
        stored = _stored_optimizers(extra)
        self._say_what_changed(extra)
        for optimizer in self.optimizers:
            optimizer.restore_numbers(stored.get(optimizer.name, {}), self._elsewhere)
        extra_state.import_user(self.extra, extra, self._say)
        module_state.load(self._names.modules, extra, self._elsewhere, self._say)
        if self.rank_state is not None:
            self.rank_state.load(extra)
        self._stored_positions = extra.get(_POSITIONS, [])
        for number, position in enumerate(self._positions):
            self.load_position(number, position)

    def load_position(self, number: int, position: extra_state.Stateful) -> None:
        """Fill the position with this number, if a checkpoint was restored."""
        if self._stored_positions is None:
            return
        if number < len(self._stored_positions):
            position.load_state_dict(self._stored_positions[number])
        else:
            position.load_state_dict({**position.state_dict(), "epoch": 0, "offset": 0, "drawn": 0})
            self._say(
                f"session.data: the checkpoint has no position of loader {number}, which begins "
                "with its first epoch"
            )

    def _say_what_changed(self, extra: Mapping[str, Any]) -> None:
        """Settings of the script that have changed and do not apply, as the checkpoint has them."""
        stored = _stored_optimizers(extra)
        changed = [
            *(text for optimizer in self.optimizers
              for text in optimizer.changed_settings(stored.get(optimizer.name, {}))),
            *extra_state.changed_settings(self._in_script, extra),
        ]  # fmt: skip
        if changed:
            self._say(
                "the checkpoint's settings replace the script's: "
                f"{few(changed, _MAX_NAMED)}; to change one, set it after s.restore, "
                "such as optimizer.param_groups[0]['lr'] and its schedule's base_lrs"
            )

    def make_optimizer_tensor(
        self, entry: str, shape: tuple[int, ...], dtype: str
    ) -> StateTensor | None:
        """A new tensor of optimizer state for an entry of a file, registered with its optimizer,
        with undefined values. None: no optimizer has it. Raises UserError if it is unknown how to
        divide it on this mesh."""
        for optimizer in self.optimizers:
            if entry.startswith(optimizer.prefix):
                return optimizer.make(entry, shape, dtype)
        return None


def combined_extra(
    extra: Mapping[str, Any], more: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Any]:
    """`extra` of the shards read before, with what `more`, that of a shard with entries of these
    names, has of single parameters: each stage of a pipeline has other parameters."""
    read_before, both = _stored_optimizers(extra), {}
    for name, stored in _stored_optimizers(more).items():
        combined, before = dict(stored), read_before.get(name, {})
        if combined.get("without") == "all":
            combined["without"] = [n.removeprefix(MODEL) for n in names if n.startswith(MODEL)]
        if "scalars" in before:
            combined["scalars"] = {**combined.get("scalars", {}), **before["scalars"]}
        if "without" in before and "without" in combined:
            combined["without"] = list(dict.fromkeys([*before["without"], *combined["without"]]))
        both[name] = {**before, **combined}
    of_optimizers = {"optimizer": both[""]} if "optimizer" in more else {"optimizers": both}
    modules = {**more.get(MODULES, {}), **extra.get(MODULES, {})}
    of_modules = {MODULES: modules} if modules else {}
    return {**more, **extra, **of_optimizers, **of_modules}


def _stored_optimizers(extra: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    if "optimizer" in extra:
        return {"": extra["optimizer"]}
    return dict(extra.get("optimizers", {}))


def _listed(names: Any) -> str:
    names = list(names)
    return "one optimizer" if names == [""] else f"the optimizers {', '.join(sorted(names))}"

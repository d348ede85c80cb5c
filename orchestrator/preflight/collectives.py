"""Calls that all ranks have to make together, and the conditions under which only some make them.

A call under a condition on the rank is reported unless the same call stands under another condition
on the rank in the same function: `if rank != 0: barrier()` and later `if rank == 0: barrier()` is
how one rank goes first. Calls with a group of their own are left out: the condition may select its
members.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import NamedTuple

from .facts import (
    ACCELERATOR,
    DDP,
    DEEPSPEED,
    FSDP1,
    PER_RANK,
    RANK,
    SESSION,
    SHARDED,
    Facts,
)
from .flow import Function, Guard, Site
from .report import Report, shown

_GROUP_AT = {
    "all_reduce": 2, "all_reduce_coalesced": 2, "broadcast": 2, "broadcast_object_list": 2,
    "all_gather": 2, "all_gather_into_tensor": 2, "all_gather_object": 2,
    "all_gather_coalesced": 2, "gather": 3, "gather_object": 3, "reduce": 3,
    "reduce_scatter": 3, "reduce_scatter_tensor": 3, "scatter": 3, "scatter_object_list": 3,
    "all_to_all": 2, "all_to_all_single": 4, "barrier": 0, "monitored_barrier": 0,
}  # fmt: skip
"""Collectives of torch.distributed and the position of their argument `group`."""
_GROUP_MAKERS = ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group",
                 "init_device_mesh")  # fmt: skip
_OF_ACCELERATE = ("wait_for_everyone", "gather", "gather_for_metrics", "reduce", "get_state_dict",
                  "save_state", "load_state", "pad_across_processes")  # fmt: skip
_OF_DEEPSPEED = ("save_checkpoint", "load_checkpoint", "save_16bit_model", "backward", "step")
_OF_SESSION = ("step", "restore", "finish", "save")
_STATE_OF_MODEL = (
    "get_model_state_dict", "get_state_dict", "get_optimizer_state_dict",
    "set_model_state_dict", "set_state_dict", "set_optimizer_state_dict",
)  # fmt: skip
_STATE_OF_FSDP1 = ("state_dict", "full_optim_state_dict", "optim_state_dict",
                   "summon_full_params", "sharded_optim_state_dict")  # fmt: skip
_HANG101, _HANG102, _HANG103, _HANG104 = "HANG101", "HANG102", "HANG103", "HANG104"
_FSDP203 = "FSDP203"
_STATE_OF_SHARD = "state_dict of FSDP2"
"""Key of a call that needs no other rank, and returns one rank's shard."""


class SharedCall(NamedTuple):
    """A call that is a collective: `key` is the same for calls that can meet, `rule` reports it
    under a branch, `path` is how it is reached."""

    key: str
    rule: str
    text: str


def check(facts: Facts, report: Report) -> None:
    collectives = _Collectives(facts)
    for function in facts.functions:
        _check_function(facts, collectives, function, report)
        _check_forward(facts, function, report)


class _Collectives:
    """Calls that communicate, directly or through functions of the project."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._inside: dict[int, SharedCall] = {}
        """id of a function -> the collective that it always calls."""
        for _ in range(6):
            new = {
                id(function): shared
                for function in facts.functions
                if not isinstance(function.node, ast.Module) and (shared := self._always(function))
            }
            if new == self._inside:
                break
            self._inside = new

    def _always(self, function: Function) -> SharedCall | None:
        for site in function.sites:
            if self._facts.rank_guards(site) or site.context.in_except:
                continue
            call = self.of(site)
            if call is not None and call.rule in (_HANG101, _HANG103, _FSDP203):
                text = f"{shown(site.call.func, 40)}() in line {site.call.lineno}"
                return call._replace(text=text)
        return None

    def of(self, site: Site) -> SharedCall | None:
        """None for a call that needs no other rank, and for one with a group of its own."""
        text = f"{shown(site.call.func, 40)}()"
        if rule := self._direct(site):
            kinds = self._facts.kinds(site.function, site.receiver)
            of_shard = rule == _FSDP203 and FSDP1 not in kinds and bool(kinds & SHARDED)
            return SharedCall(_STATE_OF_SHARD if of_shard else site.method, rule, text)
        for target in self._facts.targets(site):
            if inside := self._inside.get(id(target)):
                return inside._replace(text=f"{text}, which calls {inside.text},")
        return None

    def _direct(self, site: Site) -> str:
        name, last = site.name, site.name.rpartition(".")[2]
        if name.startswith("torch.distributed."):
            return self._torch_collective(site, last)
        if name.startswith("torch.nn.parallel.") and last == "DistributedDataParallel":
            return "" if _has_group(site, "process_group") else _HANG101
        if name:
            return ""
        kinds = self._facts.kinds(site.function, site.receiver)
        for kind, methods in (
            (ACCELERATOR, _OF_ACCELERATE), (DEEPSPEED, _OF_DEEPSPEED), (SESSION, _OF_SESSION),
        ):  # fmt: skip
            if kind in kinds and site.method in methods:
                return _HANG101
        if site.method == "full_tensor" and not site.call.args:
            return _HANG103
        return self._model_collective(site, kinds)

    def _torch_collective(self, site: Site, last: str) -> str:
        if last in _GROUP_AT:
            if ".checkpoint." in site.name or ".rpc." in site.name:
                return ""
            return "" if _has_group(site, "group", _GROUP_AT[last]) else _HANG101
        if last in _GROUP_MAKERS:
            local = site.argument("use_local_synchronization")
            return _HANG101 if local is None else ""
        if last in _STATE_OF_MODEL:
            sharded = self._facts.is_sharded(site.function, site.argument("model", 0))
            return _HANG103 if sharded else ""
        if last in ("save", "load", "async_save") and ".checkpoint" in site.name:
            alone = site.argument("no_dist") or site.argument("process_group")
            return "" if alone is not None else _HANG101
        if last == "distribute_tensor":
            return "" if site.argument("src_data_rank") is not None else _HANG101
        is_fsdp1 = "FullyShardedDataParallel." in site.name and last in _STATE_OF_FSDP1
        return _FSDP203 if is_fsdp1 else ""

    def _model_collective(self, site: Site, kinds: set[str]) -> str:
        """Methods and calls of a model that is sharded, or replicated by DDP."""
        if site.method == "backward" and site.receiver is not None:
            loss, line = site.receiver, site.call.lineno
            return _HANG104 if self._facts.is_output(site.function, loss, line) else ""
        if site.method == "state_dict" and kinds & SHARDED:
            return _FSDP203
        if site.method in _STATE_OF_FSDP1 and FSDP1 in kinds:
            return _FSDP203
        called = self._facts.kinds(site.function, site.call.func)
        if called & SHARDED or (kinds & SHARDED and site.method in ("forward", "generate")):
            return _HANG104
        return ""


def _has_group(site: Site, name: str, position: int | None = None) -> bool:
    """True if the call names a group that is not the group of all ranks."""
    group = site.argument(name, position)
    if group is None and name == "group":
        group = site.argument("pg")
    if group is None or (isinstance(group, ast.Constant) and group.value is None):
        return site.forwards_keywords
    return not ast.unparse(group).endswith(("WORLD", "GroupMember.WORLD"))


def _check_function(facts: Facts, found: _Collectives, function: Function, report: Report) -> None:
    guarded: dict[str, list[tuple[Site, SharedCall, list[Guard]]]] = defaultdict(list)
    for site in function.sites:
        collective = found.of(site)
        if collective is None:
            continue
        guards = facts.rank_guards(site)
        if guards:
            guarded[collective.key].append((site, collective, guards))
        elif site.context.in_except and collective.rule == _HANG101:
            report.at("HANG106", site, f"{collective.text} in except")
        else:
            _check_loop(facts, site, collective, report)
    for calls in guarded.values():
        if len({guards[-1].key for _site, _collective, guards in calls}) > 1:
            continue
        for site, collective, guards in calls:
            _report(facts, site, collective, guards[-1], report)


def _report(facts: Facts, site: Site, collective: SharedCall, guard: Guard, report: Report) -> None:
    test = shown(guard.test, 50)
    if guard.leaves:
        what = (
            f"{collective.text} after the {guard.leaves} of some ranks in line {guard.line} "
            f"(condition {test})"
        )
        rule = _HANG102 if collective.rule == _HANG101 else collective.rule
        report.at(rule, site, what)
        return
    condition = test if guard.positive else f"not ({test})"
    what = f"{collective.text} under {condition}"
    if collective.key == _STATE_OF_SHARD:
        why = "it returns only the shard of this rank: the rest of the model is not saved"
        fix = "on every rank call get_model_state_dict with StateDictOptions(full_state_dict=True)"
        report.at(_FSDP203, site, what, why=why, fix=fix)
        return
    report.at(collective.rule, site, what)


def _check_loop(facts: Facts, site: Site, collective: SharedCall, report: Report) -> None:
    """HANG107: the loop runs over data that was divided by the rank without evening it out."""
    for loop in site.context.loops:
        if isinstance(loop, ast.While):
            continue
        if any("Join" in ast.unparse(manager) for manager in site.context.managers):
            continue
        if why := _uneven(facts, site.function, loop.iter):
            what = f"{collective.text} in the loop of line {loop.lineno} over {why}"
            report.at("HANG107", site, what)
            return


def _uneven(facts: Facts, function: Function, iterated: ast.expr) -> str:
    """Words for data of which each rank has a slice of its own length; "" for other data."""
    while isinstance(iterated, ast.Call) and ast.unparse(iterated.func).endswith(
        ("enumerate", "tqdm", "iter", "range", "len")
    ):
        if not iterated.args:
            return ""
        iterated = iterated.args[-1]
    if facts.is_rank(function, iterated):
        return f"a number of rounds that differs by rank ({shown(iterated, 30)})"
    sources = [iterated]
    if isinstance(iterated, (ast.Name, ast.Attribute)):
        text = ast.unparse(iterated)
        sources += [
            b.value for s in function.scopes for b in s.bindings if ast.unparse(b.target) == text
        ]
    for source in sources:
        if "drop_last=True" in ast.unparse(source):
            continue
        for part in ast.walk(source):
            if isinstance(part, ast.Slice) and any(
                value is not None and _differs(facts, function, value)
                for value in (part.lower, part.step, part.upper)
            ):
                return f"a slice that differs by rank ({shown(source, 40)})"
    return ""


def _differs(facts: Facts, function: Function, node: ast.expr) -> bool:
    return bool({PER_RANK, RANK} & facts.kinds(function, node)) or facts.is_rank(function, node)


def _check_forward(facts: Facts, function: Function, report: Report) -> None:
    """HANG105: submodules that only some ranks use, in a model of a project that synchronises."""
    if function.node.__class__ is ast.Module or not function.name.endswith(".forward"):
        return
    if not facts.uses(*SHARDED, DDP):
        return
    by_guard: dict[int, dict[bool, set[str]]] = defaultdict(lambda: defaultdict(set))
    places: dict[int, Site] = {}
    for site in function.sites:
        if not ast.unparse(site.call.func).startswith("self.") or facts.targets(site):
            continue
        for guard in facts.rank_guards(site):
            by_guard[guard.line][guard.positive].add(ast.unparse(site.call.func))
            places.setdefault(guard.line, site)
    for line, sides in by_guard.items():
        if sides[True] != sides[False]:
            what = (
                f"{shown(places[line].call.func)}() in forward() under the condition of line {line}"
            )
            report.at("HANG105", places[line], what)

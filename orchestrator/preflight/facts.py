"""Kinds of the values of the user's code: a rank, a sharded model, an Accelerator.

Found from assignments, from calls of functions of the project, and, for ranks, from usual names.
The order of statements is not used: a value has every kind that it has anywhere in its scope.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from .flow import Binding, Context, Function, Guard, Site, functions
from .source import Project

RANK, PER_RANK = "rank", "per rank"
"""RANK: differs between all ranks and can be compared; PER_RANK: a value made from one."""
FSDP1, FSDP2, DDP = "FSDP1", "FSDP2", "DDP"
ACCELERATOR, DEEPSPEED, SESSION, OPTIMIZER = "Accelerator", "DeepSpeed", "session", "optimizer"
SHARDED = frozenset({FSDP1, FSDP2})
UNKNOWN_CALL = "unknown call"
NOT_RANK = "not a rank"

_RANK_NAMES = re.compile(
    r"(ddp_|global_|world_|local_|node_|my_|proc_|dist_)*(rank|process_index)(_id)?$"
    r"|(is_|am_)?(local_|global_|world_)?(main|master|chief|zero|root|first)_?(process|rank|proc)$"
    r"|is_(main|master|chief|rank_?(zero|0)|(global|local|world)_zero|world_process_zero"
    r"|local_process_zero)$"
    r"|rank_?(0|zero)$",
    re.IGNORECASE,
)
"""Names of values that differ by rank. Ranks on one axis (tp_rank, pp_rank) are not among them:
a collective of another axis is complete under such a condition."""
_RANK_CALLS = re.compile(
    r"get_(global_|local_|node_local_|world_)?(rank|process_index)$"
    r"|(is_|am_)(local_|global_|torchelastic_)?(main|master|chief|first|zero)_?(process|rank|proc)$"
    r"|is_(main|master|chief|rank_?(zero|0))$",
)
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID",
                   "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK")  # fmt: skip
_SAME_MODEL = ("to", "cuda", "cpu", "train", "eval", "float", "bfloat16", "half", "requires_grad_")
_ROUNDS = 5
_NOWHERE = Context()


class Facts:
    """The functions of a project and the kinds of their values."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.functions = functions(project)
        self.sites = [site for function in self.functions for site in function.sites]
        self._by_name = {f.name: f for f in self.functions}
        self._bases = dict(self._classes())
        """Class of the project -> the classes that it names as its bases."""
        self._kinds: dict[tuple[object, str], set[str]] = defaultdict(set)
        self._returned: dict[int, set[str]] = defaultdict(set)
        self._effects: dict[tuple[int, str], set[str]] = defaultdict(set)
        for _ in range(_ROUNDS):
            before = self._size()
            for function in self.functions:
                self._read(function)
            if self._size() == before:
                break
        self._callers: dict[int, list[Site]] = defaultdict(list)
        for site in self.sites:
            for target in self.targets(site):
                self._callers[id(target)].append(site)

    def _size(self) -> int:
        return sum(map(len, (*self._kinds.values(), *self._returned.values(),
                             *self._effects.values())))  # fmt: skip

    # -- reading assignments and calls ------------------------------------------------------------
    def _read(self, function: Function) -> None:
        for binding in function.bindings:
            kinds = set() if binding.is_loop else self._value_kinds(function, binding)
            if self.mentions_rank(function, binding.value):
                kinds = kinds | {PER_RANK}
            self._add(function, binding.target, kinds)
        for value in function.returns:
            kinds = self.kinds(function, value)
            if self.is_rank(function, value):
                kinds = kinds | {RANK}
            self._returned[id(function)] |= kinds - {NOT_RANK}
        for site in function.sites:
            self._apply(site)

    def _value_kinds(self, function: Function, binding: Binding) -> set[str]:
        value, index = binding.value, binding.place
        kinds = set(self.kinds(function, value))
        if isinstance(value, ast.Call):
            name = self.project.resolve(function.module, value.func)
            if name == "deepspeed.initialize":
                return {DEEPSPEED} if index in (0, None) else set()
        if index is None:
            if self.is_rank(function, value):
                kinds.add(RANK)
            elif _is_no_rank(value):
                kinds.add(NOT_RANK)
        return kinds if index is None else kinds & {UNKNOWN_CALL}

    def _add(self, function: Function, target: ast.expr, kinds: set[str]) -> None:
        if isinstance(target, ast.Starred):
            target = target.value
        if kinds and isinstance(target, (ast.Name, ast.Attribute)):
            self._kinds[self._key(function, target)] |= kinds

    def _key(self, function: Function, target: ast.expr) -> tuple[object, str]:
        text = ast.unparse(target)
        if text.startswith("self.") and function.class_name:
            return (function.module.name, function.class_name), text
        return id(function.node), text

    def _apply(self, site: Site) -> None:
        """Apply a call's effect on its arguments, and pass their kinds to the called function."""
        if site.name.startswith("torch.") and site.last == "fully_shard" and site.call.args:
            first = site.call.args[0]
            parts = first.elts if isinstance(first, (ast.List, ast.Tuple)) else [first]
            for part in parts:
                self._affect(site.function, part, FSDP2)
        for target in self.targets(site):
            for name, value in arguments(site, target):
                kinds = self.kinds(site.function, value) - {NOT_RANK, UNKNOWN_CALL}
                if self.is_rank(site.function, value):
                    kinds = kinds | {RANK}
                self._kinds[id(target.node), name] |= kinds
                for kind in self._effects[id(target), name]:
                    self._affect(site.function, value, kind)

    def _affect(self, function: Function, value: ast.expr, kind: str) -> None:
        if not isinstance(value, (ast.Name, ast.Attribute)):
            return
        text = ast.unparse(value)
        owner = next((scope for scope in function.scopes if self._binds(scope, text)), function)
        self._kinds[self._key(owner, value)].add(kind)
        if text in owner.all_parameters:
            self._effects[id(owner), text].add(kind)

    def _binds(self, function: Function, text: str) -> bool:
        return text in function.all_parameters or any(
            ast.unparse(binding.target) == text for binding in function.bindings
        )

    # -- questions ---------------------------------------------------------------------------------
    def kinds(self, function: Function, node: ast.expr | None) -> set[str]:
        """The kinds of an expression; empty if nothing is known."""
        match node:
            case ast.Name() | ast.Attribute():
                return self._name_kinds(function, node)
            case ast.Call():
                return self._call_kinds(function, node)
            case ast.IfExp():
                return self.kinds(function, node.body) | self.kinds(function, node.orelse)
            case ast.Await():
                return self.kinds(function, node.value)
        return set()

    def _name_kinds(self, function: Function, node: ast.Name | ast.Attribute) -> set[str]:
        text = node.id if isinstance(node, ast.Name) else ast.unparse(node)
        if text.startswith("self.") and function.class_name:
            kinds = self._kinds.get(((function.module.name, function.class_name), text))
            if kinds:
                return kinds
        for scope in function.scopes:
            kinds = self._kinds.get((id(scope.node), text))
            if kinds:
                return kinds
            if text in scope.all_parameters:
                return set()
        if isinstance(node, ast.Attribute):
            owner = self.kinds(function, node.value)
            if node.attr == "module":
                return owner & SHARDED
            for kind in owner:
                if kind.startswith("class:"):
                    module, _dot, name = kind.removeprefix("class:").rpartition(".")
                    return self._kinds.get(((module, name), f"self.{node.attr}"), set())
        dotted = self.project.resolve(function.module, node)
        module, _dot, name = dotted.rpartition(".")
        if module in self.project.modules and module != function.module.name:
            return self._kinds.get((id(self.project.modules[module].tree), name), set())
        return set()

    def _call_kinds(self, function: Function, call: ast.Call) -> set[str]:
        name = self.project.resolve(function.module, call.func)
        last = name.rpartition(".")[2]
        if name.startswith("torch."):
            wrappers = {"FullyShardedDataParallel": FSDP1, "DistributedDataParallel": DDP,
                     "fully_shard": FSDP2, "replicate": DDP}  # fmt: skip
            if last in wrappers:
                return {wrappers[last]}
            if name == "torch.compile" and call.args:
                return self.kinds(function, call.args[0])
            if name.startswith("torch.optim.") and last[:1].isupper():
                return {OPTIMIZER}
        if name == "accelerate.Accelerator":
            return {ACCELERATOR}
        if name in ("holdfast.session.init", "holdfast.workers.session.init"):
            return {SESSION}
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME_MODEL:
            return self.kinds(function, call.func.value)
        site = Site(call, name, function, _NOWHERE)
        if name in self._bases:
            return {f"class:{name}"}
        returned: set[str] = set()
        for target in self.targets(site):
            returned |= self._returned[id(target)]
        return returned or ({UNKNOWN_CALL} if not _is_no_rank(call) else set())

    def targets(self, site: Site) -> list[Function]:
        """The functions of the project that a call may mean."""
        called, function = site.call.func, site.function
        if isinstance(called, ast.Name):
            for scope in function.scopes:
                if called.id in scope.nested:
                    return [scope.nested[called.id]]
        if site.name:
            candidates = self._by_name.get(site.name) or self._method(site.name, "__init__")
            return [candidates] if candidates is not None else []
        if not isinstance(called, ast.Attribute):
            return []
        if ast.unparse(called.value) in ("self", "cls") and function.class_name:
            owners = [f"{function.module.name}.{function.class_name}"]
        else:
            kinds = self.kinds(function, called.value)
            owners = [k.removeprefix("class:") for k in kinds if k.startswith("class:")]
        found_in = [self._method(owner, called.attr) for owner in owners]
        return [method for method in found_in if method is not None]

    def _method(self, owner: str, name: str, depth: int = 8) -> Function | None:
        """The method of a class of the project, or of the first of its bases that has it."""
        if (function := self._by_name.get(f"{owner}.{name}")) is not None:
            return function
        for base in self._bases.get(owner, ()) if depth else ():
            if (function := self._method(base, name, depth - 1)) is not None:
                return function
        return None

    def _classes(self) -> Iterator[tuple[str, list[str]]]:
        for module in self.project.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    bases = [self.project.resolve(module, base) for base in node.bases]
                    yield f"{module.name}.{node.name}", bases

    def is_rank(self, function: Function, node: ast.expr) -> bool:
        """True if the value of the expression depends on the global or local rank."""
        match node:
            case ast.Name() | ast.Attribute():
                kinds = self._name_kinds(function, node)
                if RANK in kinds:
                    return True
                name = node.id if isinstance(node, ast.Name) else node.attr
                unlikely = NOT_RANK in kinds and UNKNOWN_CALL not in kinds
                return bool(_RANK_NAMES.match(name)) and not unlikely
            case ast.Call():
                return self._is_rank_call(function, node)
            case ast.Subscript():
                key = node.slice
                return (
                    self.project.resolve(function.module, node.value) == "os.environ"
                    and isinstance(key, ast.Constant) and key.value in _RANK_VARIABLES
                )  # fmt: skip
            case ast.Compare():
                parts = (node.left, *node.comparators)
                if any(_excludes(part) for part in parts):
                    return False
                return any(self.is_rank(function, part) for part in parts)
            case ast.BoolOp():
                return any(self.is_rank(function, part) for part in node.values)
            case ast.UnaryOp():
                return self.is_rank(function, node.operand)
            case ast.BinOp():
                return any(self.is_rank(function, side) for side in (node.left, node.right))
            case ast.NamedExpr():
                return self.is_rank(function, node.value)
        return False

    def _is_rank_call(self, function: Function, call: ast.Call) -> bool:
        name = self.project.resolve(function.module, call.func)
        last = name.rpartition(".")[2] or (
            call.func.attr if isinstance(call.func, ast.Attribute) else "")  # fmt: skip
        if name in ("os.environ.get", "os.getenv") and call.args:
            key = call.args[0]
            return isinstance(key, ast.Constant) and key.value in _RANK_VARIABLES
        if isinstance(call.func, ast.Name) and call.func.id in ("int", "bool", "str"):
            return any(self.is_rank(function, part) for part in call.args)
        if _RANK_CALLS.match(last):
            return not call.args and not call.keywords  # of a group: a rank on one axis
        site = Site(call, name, function, _NOWHERE)
        return any(RANK in self._returned[id(target)] for target in self.targets(site))

    def mentions_rank(self, function: Function, node: ast.expr) -> bool:
        """True if a rank is a part of the expression, such as of a file name."""
        for part in ast.walk(node):
            if isinstance(part, ast.expr):
                if self.is_rank(function, part):
                    return True
                if isinstance(part, (ast.Name, ast.Attribute)) and {
                    PER_RANK, RANK,
                } & self._name_kinds(function, part):  # fmt: skip
                    return True
        return False

    def uses(self, *kinds: str) -> bool:
        """True if any value of the project has one of the kinds."""
        return any(held & set(kinds) for held in (*self._kinds.values(), *self._returned.values()))

    def sites_of(self, *functions: str) -> list[Site]:
        """The calls of the functions with these names."""
        return [site for site in self.sites if site.last in functions]

    def is_output(self, function: Function, node: ast.expr, line: int, depth: int = 4) -> bool:
        """True if the value that the expression has in a line is computed from what a sharded or
        replicated model returned. Of each name the last assignment above the line counts."""
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and self.kinds(function, part.func) & {*SHARDED, DDP}:
                return True
            if not isinstance(part, ast.Name) or depth == 0:
                continue
            above = [
                binding
                for binding in function.bindings
                if ast.unparse(binding.target) == part.id and binding.target.lineno < line
            ]
            if above:
                last = max(above, key=lambda binding: binding.target.lineno)
                if self.is_output(function, last.value, last.target.lineno, depth - 1):
                    return True
        return False

    def rank_guards(self, site: Site) -> list[Guard]:
        """The conditions on the rank under which a call runs, outermost first."""
        guarded = {guard.key for guard in site.context.guards}
        return [
            guard
            for guard in site.context.guards
            if self.is_rank(site.function, guard.test) and not _is_decided(guard, guarded)
        ]

    def runs_on_some_ranks(self, site: Site) -> bool:
        """True if the call, or each call of its function in the project, is under a condition on
        the rank."""
        if self.rank_guards(site):
            return True
        calls = self._callers.get(id(site.function), [])
        return bool(calls) and all(self.rank_guards(call) for call in calls)

    def is_sharded(self, function: Function, node: ast.expr | None) -> bool:
        return bool(self.kinds(function, node) & SHARDED)


def arguments(site: Site, target: Function) -> list[tuple[str, ast.expr]]:
    """(parameter, argument) of a call of a function of the project."""
    names = target.parameters
    if target.is_method and (site.receiver is not None or target.name.endswith(".__init__")):
        names = names[1:]
    args = [a for a in site.call.args if not isinstance(a, ast.Starred)]
    pairs = list(zip(names, args, strict=False))
    taken = target.all_parameters
    pairs += [(k.arg, k.value) for k in site.call.keywords if k.arg is not None and k.arg in taken]
    return pairs


def _is_decided(guard: Guard, known: set[tuple[str, bool]]) -> bool:
    """True if another part of the condition already decides it: in the branch `flag` of an else of
    `if not flag and is_main`, the rank does not matter."""
    test, positive = guard.test, guard.positive
    if not isinstance(test, ast.BoolOp) or isinstance(test.op, ast.And) == positive:
        return False
    return any(Guard(part, positive, 0).key in known for part in test.values)


def _excludes(node: ast.expr) -> bool:
    """True for a value that shows whether there is a rank at all: None, -1, the world size."""
    if isinstance(node, ast.Constant):
        return node.value is None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return True
    return isinstance(node, (ast.Name, ast.Attribute, ast.Call)) and bool(
        re.search(r"world_?size|num_processes|nprocs", ast.unparse(node), re.IGNORECASE)
    )


def _is_no_rank(node: ast.expr) -> bool:
    """True if a value is not a process's rank despite its name: a tensor's or LoRA's rank."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Call):
        last = ast.unparse(node.func).rpartition(".")[2]
        return last in ("dim", "len", "matrix_rank", "size", "min", "max", "range")
    return isinstance(node, ast.Attribute) and node.attr in ("ndim", "shape", "lora_rank", "r")

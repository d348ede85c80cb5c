"""FSDP1, its options and what FSDP2 does instead; numbers formats of reduction; units; order."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from .facts import FSDP2, OPTIMIZER, SHARDED, Facts
from .flow import Binding, Function, Site
from .report import Report, shown

ANSWERS = {
    "backward_prefetch": "FSDP2 always gathers the next block in backward; to choose how many, "
    "call set_modules_to_backward_prefetch",
    "forward_prefetch": "FSDP2 overlaps by itself; to gather further ahead, call "
    "set_modules_to_forward_prefetch",
    "limit_all_gathers": "FSDP2 needs no limit: it frees memory without waiting on the CPU",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "sync_module_states": "load with StateDictOptions(full_state_dict=True, "
    "broadcast_from_rank0=True)",
    "device_id": "FSDP2 uses the device of the mesh: call torch.cuda.set_device(local_rank)",
    "buffer_dtype": "FSDP2 leaves buffers alone: convert them with .to()",
    "sharding_strategy": "FULL_SHARD is reshard_after_forward=True, SHARD_GRAD_OP is False, "
    "HYBRID_SHARD a mesh of two dimensions",
    "auto_wrap_policy": "call fully_shard on each block in a loop",
    "cpu_offload": "pass offload_policy=CPUOffloadPolicy()",
    "mixed_precision": "pass mp_policy=MixedPrecisionPolicy(...)",
    "ignored_modules": "pass ignored_params",
    "ignored_states": "pass ignored_params",
    "param_init_fn": "build on torch.device('meta'), then to_empty() and initialise",
    "process_group": "pass mesh",
    "device_mesh": "pass mesh",
}
"""Option of FSDP1 -> what FSDP2 does instead (T03 to T11 of the inventory)."""
_TO_REPORT = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params",
              "sync_module_states", "device_id")  # fmt: skip
_ACCELERATE_2 = {
    "backward_prefetch": "FSDP2 always uses BACKWARD_PRE",
    "forward_prefetch": "accelerate does not support it with FSDP2",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "sync_module_states": "cpu_ram_efficient_loading broadcasts without it",
    "sharding_strategy": "write reshard_after_forward: true for FULL_SHARD, false for "
    "SHARD_GRAD_OP",
    "limit_all_gathers": "FSDP2 needs no limit",
}
_SHARDERS = ("fully_shard", "FullyShardedDataParallel")
_LOW = ("float16", "bfloat16", "half")


def check(facts: Facts, report: Report) -> None:
    for site in facts.sites:
        if handler := _HANDLERS.get(site.last):
            handler(facts, site, report)
    for function in facts.functions:
        _check_order(facts, function, report)
    _check_units(facts, report)
    _check_tied(facts, report)


def dtype_of(facts: Facts, function: Function, node: ast.expr | None) -> str:
    """`float16` for torch.float16, also of a variable or a text; "" if unknown."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {"fp16": "float16", "bf16": "bfloat16"}.get(node.value, node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = facts.project.resolve(function.module, node)
        if name.startswith("torch."):
            last = name.rpartition(".")[2]
            return "float16" if last == "half" else last
        if (value := value_of(function, node)) is not node:
            return dtype_of(facts, function, value)
    return ""


def bindings_of(function: Function, text: str) -> list[Binding]:
    """Assignments of a name in the nearest scope that has any."""
    for scope in function.scopes:
        bindings = [b for b in scope.bindings if ast.unparse(b.target) == text and b.place is None]
        if bindings or text in scope.all_parameters:
            return bindings
    return []


def value_of(function: Function, node: ast.expr | None) -> ast.expr | None:
    """The value that a variable was assigned, if that is known."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        values = [binding.value for binding in bindings_of(function, ast.unparse(node))]
        return values[0] if len(values) == 1 else node
    return node


def _is_torch(site: Site) -> bool:
    return site.name.startswith("torch.")


def _fsdp1(facts: Facts, site: Site, report: Report) -> None:
    if not site.name.startswith("torch.distributed."):
        return
    what = f"{shown(site.call.func)}()"
    report.at("FSDP201", site)
    for keyword in site.call.keywords:
        if keyword.arg in _TO_REPORT:
            answer = ANSWERS[keyword.arg]
            report.add(
                "FSDP202", site.function.module, keyword, f"{keyword.arg} of FSDP1", fix=answer
            )
    strategy = ast.unparse(site.argument("sharding_strategy", 2) or ast.Constant(""))
    if "NO_SHARD" in strategy:
        fix = "use DistributedDataParallel"
        report.at("FSDP205", site, "ShardingStrategy.NO_SHARD", fix=fix)
    policy = site.argument("auto_wrap_policy", 4)
    if policy is None and not site.forwards_keywords and not _is_nested(facts, site):
        report.at("FSDP208", site, f"{what} without auto_wrap_policy")
    is_original = site.is_true("use_orig_params") or site.forwards_keywords
    if facts.project.imports("peft") and not is_original:
        report.at("FSDP217", site, f"{what} of a model with adapters")


def _is_nested(facts: Facts, site: Site) -> bool:
    """True if the project wraps parts by FSDP1 itself: several calls, or one in a loop."""
    del facts
    others = [s for s in site.function.sites if s.last == site.last and s is not site]
    return (
        bool(others)
        or bool(site.context.loops)
        or not isinstance(site.argument("module", 0), (ast.Name, ast.Attribute))
    )


def _fully_shard(facts: Facts, site: Site, report: Report) -> None:
    del facts
    if not _is_torch(site):
        return
    for keyword in site.call.keywords:
        if keyword.arg in ANSWERS:
            what = f"{keyword.arg} passed to fully_shard()"
            module = site.function.module
            report.add("FSDP204", module, keyword, what, fix=ANSWERS[keyword.arg])


def _state_dict_type(facts: Facts, site: Site, report: Report) -> None:
    del facts
    if "FullyShardedDataParallel" in site.name:
        fix = "use get_model_state_dict and set_model_state_dict"
        report.at("FSDP205", site, fix=fix)


def _policy(facts: Facts, site: Site, report: Report) -> None:
    if not _is_torch(site) or site.forwards_keywords:
        return
    function = site.function
    param = dtype_of(facts, function, site.argument("param_dtype", 0))
    reduce = site.argument("reduce_dtype", 1)
    if reduce is None and param in _LOW:
        report.at("FSDP206", site)
    elif dtype_of(facts, function, reduce) in _LOW:
        report.at("FSDP207", site, f"reduce_dtype={shown(reduce)}" if reduce is not None else "")


def _policy_of_fsdp1(facts: Facts, site: Site, report: Report) -> None:
    if not site.name.startswith("torch.distributed.fsdp") or site.forwards_keywords:
        return
    function = site.function
    reduce = site.argument("reduce_dtype", 1)
    param = dtype_of(facts, function, site.argument("param_dtype", 0))
    if dtype_of(facts, function, reduce) in _LOW:
        report.at("FSDP207", site, f"reduce_dtype={shown(reduce or site.call)}")
    elif reduce is None and param in _LOW:
        what = f"{shown(site.call.func)}() without reduce_dtype"
        report.at("FSDP207", site, what)
    if site.argument("buffer_dtype", 2) is not None:
        report.at("FSDP202", site, "buffer_dtype of FSDP1", fix=ANSWERS["buffer_dtype"])


def _plugin(facts: Facts, site: Site, report: Report) -> None:
    del facts
    version = site.argument("fsdp_version")
    if not site.name.startswith("accelerate") or not isinstance(version, ast.Constant):
        return
    if version.value == 2:
        for keyword in site.call.keywords:
            if keyword.arg in _ACCELERATE_2:
                what = f"{keyword.arg} with fsdp_version=2"
                report.add("FSDP216", site.function.module, keyword, what,
                           fix=_ACCELERATE_2[keyword.arg])  # fmt: skip


def removed_flags(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """(flag, answer) of the arguments of `accelerate launch` that version 2 has not."""
    words = " ".join(arguments)
    if not re.search(r"--fsdp[_-]version[= ]2", words):
        return
    for option, answer in _ACCELERATE_2.items():
        if match := re.search(rf"--fsdp[_-]{option.replace('_', '[_-]')}(?=[= ]|$)", words):
            yield match[0], answer


def _four_bit(facts: Facts, site: Site, report: Report) -> None:
    if not site.is_true("load_in_4bit") or not facts.uses(*SHARDED) or site.forwards_keywords:
        return
    storage = site.argument("bnb_4bit_quant_storage")
    if storage is None or dtype_of(facts, site.function, storage) == "uint8":
        report.at("FSDP210", site)
    elif facts.uses(FSDP2):
        why = "fully_shard may alter 4-bit weights that are packed as floating point numbers"
        fix = "check the weights after sharding, or train LoRA on bfloat16 weights"
        report.at("FSDP211", site, "4-bit weights with fully_shard", why=why, fix=fix)


def _adapters(facts: Facts, site: Site, report: Report) -> None:
    if not site.name.startswith("peft") or not facts.uses(FSDP2):
        return
    cast = site.argument("autocast_adapter_dtype")
    if cast is None and any(_loads_low(facts, s) for s in facts.sites):
        why = "PEFT makes adapters float32 beside weights of 16 bits, and a group has one dtype"
        report.at("FSDP211", site, why=why, fix="pass autocast_adapter_dtype=False")


def _loads_low(facts: Facts, site: Site) -> bool:
    dtype = site.argument("torch_dtype") or site.argument("dtype")
    return site.method == "from_pretrained" and dtype_of(facts, site.function, dtype) in _LOW


_HANDLERS: dict[str, Callable[[Facts, Site, Report], None]] = {
    "FullyShardedDataParallel": _fsdp1,
    "fully_shard": _fully_shard,
    "state_dict_type": _state_dict_type,
    "set_state_dict_type": _state_dict_type,
    "MixedPrecisionPolicy": _policy,
    "MixedPrecision": _policy_of_fsdp1,
    "FullyShardedDataParallelPlugin": _plugin,
    "BitsAndBytesConfig": _four_bit,
    "get_peft_model": _adapters,
}


def _check_order(facts: Facts, function: Function, report: Report) -> None:
    """FSDP209: the optimizer has the parameters of a model that is sharded further down."""
    optimizers = [
        (site, root)
        for site in function.sites
        if facts.kinds(function, site.call) == {OPTIMIZER} and (root := _model_of(site))
    ]
    for site, root in optimizers:
        later = [s for s, r in optimizers if r == root and s.call.lineno > site.call.lineno]
        place = _sharded_after(facts, function, root, site)
        if place is None or any(s.call.lineno > place.lineno for s in later):
            continue
        what = f"{shown(site.call.func)}() of {root}, which line {place.lineno} shards"
        report.at("FSDP209", site, what)


def _model_of(site: Site) -> str:
    """`model` of AdamW(model.parameters())."""
    first = site.argument("params", 0)
    called = first.func if isinstance(first, ast.Call) else None
    is_method = isinstance(called, ast.Attribute) and called.attr == "parameters"
    return ast.unparse(called.value) if is_method and isinstance(called, ast.Attribute) else ""


def _sharded_after(facts: Facts, function: Function, root: str, site: Site) -> ast.Call | None:
    """The call that shards the very model whose parameters the optimizer has."""
    line, guards = site.call.lineno, site.context.guards
    for other in function.sites:
        call = other.call
        first = other.argument("module", 0)
        if call.lineno <= line or first is None or ast.unparse(first) != root:
            continue
        if not other.name.startswith("torch.distributed.") or other.last not in _SHARDERS:
            continue
        keys = {(g.key[0], not g.key[1]) for g in guards}
        if keys & {g.key for g in other.context.guards}:
            continue  # the other branch of the same condition
        again = [
            b
            for b in function.bindings
            if ast.unparse(b.target) == root and line <= b.target.lineno < call.lineno
        ]
        if not again:
            return call
    return None


def _check_units(facts: Facts, report: Report) -> None:
    """FSDP208: the only call of fully_shard has the whole model."""
    sites = [site for site in facts.sites_of("fully_shard") if _is_torch(site)]
    if len(sites) != 1 or sites[0].context.loops:
        return
    site = sites[0]
    inside = site.function.node
    if not isinstance(site.argument("module", 0), ast.Name):
        return
    calls = [call for call in facts.sites if site.function in facts.targets(call)]
    in_loop = not isinstance(inside, ast.Module) and any(call.context.loops for call in calls)
    if len({call.call.lineno for call in calls}) > 1 or in_loop:
        return
    report.at("FSDP208", site, f"{shown(site.call)} and nothing else")


def _check_tied(facts: Facts, report: Report) -> None:
    """FSDP212: weights are tied, and FSDP1 synchronises states or FSDP2 shards the two apart."""
    tied = [tie for function in facts.functions for tie in _ties(function)]
    if not tied:
        return
    sharded_apart: set[str] = set()
    for site in facts.sites:
        first = site.argument("module", 0)
        if site.last == "fully_shard" and _is_torch(site) and first is not None:
            sharded_apart.add(ast.unparse(first).rpartition(".")[2])
        if site.last == "FullyShardedDataParallel" and site.is_true("sync_module_states"):
            what = f"sync_module_states=True with weights tied in line {tied[0][0].lineno}"
            report.at("FSDP212", site, what)
    for node, function, left, other in tied:
        if left and other and left != other and {left, other} <= sharded_apart:
            what = f"{shown(node)}, and fully_shard() on each of the two"
            report.add("FSDP212", function.module, node, what)


def _ties(function: Function) -> Iterator[tuple[ast.expr, Function, str, str]]:
    """(node, function, owner, owner) of `a.weight = b.weight`, and of `tie_weights()`."""
    for binding in function.bindings:
        target, value = binding.target, binding.value
        if (
            isinstance(target, ast.Attribute)
            and isinstance(value, ast.Attribute)
            and target.attr == value.attr == "weight"
        ):
            owners = [ast.unparse(n.value).rpartition(".")[2] for n in (target, value)]
            yield target, function, owners[0], owners[1]
    for site in function.sites:
        if site.method == "tie_weights":
            yield site.call, function, "", ""

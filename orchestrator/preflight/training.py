"""Checks of number formats, learning rates, data, files that ranks write, and the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from holdfast.orchestrator.api.v1alpha1.variables import INEFFECTIVE

from .facts import DDP, SHARDED, Facts
from .flow import Function, Site
from .fsdp import bindings_of, dtype_of, value_of
from .report import Report, shown
from .rules import Severity

LARGEST_FULL_RATE, SMALLEST_LORA_RATE = 1e-4, 1e-5
"""Learning rates of Adam: above the first, full fine-tuning of a large pretrained model; below the
second, LoRA. The founding documents have 5e-6 and 1e-5 for full, 2e-4 for LoRA."""
_SCALERS = ("GradScaler", "ShardedGradScaler", "Accelerator", "initialize", "Trainer", "SFTTrainer",
            "Fabric")  # fmt: skip
_DISTRIBUTED = ("torch.distributed", "torch.nn.parallel", "accelerate", "deepspeed", "holdfast")


def check(facts: Facts, report: Report) -> None:
    for site in facts.sites:
        if handler := _HANDLERS.get(site.last):
            handler(facts, site, report)
        _check_device(facts, site, report)
    for function in facts.functions:
        _check_environment(facts, function, report)
    _check_imports(facts, report)
    _check_scaler(facts, report)
    _check_autocast(facts, report)
    _check_sampler(facts, report)
    _check_static_graph(facts, report)


def _init_group(facts: Facts, site: Site, report: Report) -> None:
    del facts
    has_none = site.argument("timeout", 2) is None and not site.forwards_keywords
    if site.name.startswith("torch.distributed.") and has_none:
        report.at("ENV502", site)


def _data_parallel(facts: Facts, site: Site, report: Report) -> None:
    if site.name.startswith("torch.nn."):
        beside = facts.uses(DDP, *SHARDED)  # then it is likely the branch for a single process
        report.at("DDP301", site, severity=Severity.WARNING if beside else None)


def _static_graph_method(facts: Facts, site: Site, report: Report) -> None:
    del facts
    report.at("DDP302", site)


def _save(facts: Facts, site: Site, report: Report) -> None:
    """FSDP214 and DDP305: torch.save on every rank, to a path without the rank."""
    path = site.argument("f", 1)
    if site.name != "torch.save" or path is None or facts.runs_on_some_ranks(site):
        return
    function = site.function
    if not facts.project.imports(*_DISTRIBUTED) or _may_differ(facts, function, path):
        return
    state = site.argument("obj", 0)
    models = [
        part.func.value
        for part in ast.walk(value_of(function, state) or ast.Constant(None))
        if isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr == "state_dict"
    ]
    kinds = set().union(*(facts.kinds(function, model) for model in models))
    what = f"torch.save(..., {shown(path, 40)}) on every rank"
    if kinds & SHARDED:
        report.at("FSDP214", site, what)
    elif DDP in kinds or (models and facts.uses(DDP)):
        report.at("DDP305", site, what)


def _may_differ(facts: Facts, function: Function, path: ast.expr) -> bool:
    """True if a path contains the rank, or comes from a caller who may have put it there."""
    if facts.mentions_rank(function, path):
        return True
    names = {part.id for part in ast.walk(path) if isinstance(part, ast.Name)}
    if any(names & scope.all_parameters for scope in function.scopes):
        return True
    return isinstance(path, ast.Name) and not bindings_of(function, path.id)


def _from_pretrained(facts: Facts, site: Site, report: Report) -> None:
    """FSDP215, for classes of models, where the project shards."""
    owner = shown(site.receiver).rpartition(".")[2] if site.receiver is not None else ""
    is_model = re.search(r"Model$|ModelFor|For[A-Z]\w+$", owner) is not None
    if not is_model or not facts.uses(*SHARDED) or site.forwards_keywords:
        return
    sparing = ("low_cpu_mem_usage", "device_map", "quantization_config")
    if any(site.argument(name) is not None for name in sparing) or facts.runs_on_some_ranks(site):
        return
    managers = " ".join(ast.unparse(manager) for manager in site.context.managers)
    if not re.search(r"meta|init_empty_weights|no_init", managers):
        report.at("FSDP215", site, f"{owner}.from_pretrained()")


def _load(facts: Facts, site: Site, report: Report) -> None:
    """FSDP213: load_state_dict of a sharded model under a condition on the rank."""
    guards = facts.rank_guards(site)
    if not guards or not facts.is_sharded(site.function, site.receiver):
        return
    wrapped = facts.sites_of("FullyShardedDataParallel")
    synced = any(wrapping.is_true("sync_module_states") for wrapping in wrapped)
    broadcasts = facts.sites_of("set_model_state_dict", "broadcast", "_broadcast_state_dict")
    if not synced and not broadcasts:
        what = f"{shown(site.call.func)}() under {shown(guards[-1].test, 40)}"
        report.at("FSDP213", site, what)


def _rate(facts: Facts, site: Site, report: Report) -> None:
    """NUM402 and NUM403: of Adam and of the arguments of a trainer."""
    is_adam = site.name.startswith(("torch.optim.", "bitsandbytes.")) and "Adam" in site.last
    node = site.argument("lr", 1) if is_adam else site.argument("learning_rate")
    rate = _number(site.function, node)
    if rate is None:
        return
    what = f"lr {rate:g}"
    lora = facts.project.imports("peft") and bool(facts.sites_of("LoraConfig", "get_peft_model"))
    if lora and rate <= SMALLEST_LORA_RATE:
        report.at("NUM403", site, f"{what} with LoRA")
    elif not lora and rate > LARGEST_FULL_RATE and (name := _pretrained_decoder(facts)):
        report.at("NUM402", site, f"{what} for all weights of {name}")


def _pretrained_decoder(facts: Facts) -> str:
    """The call that loads a pretrained decoder; "" if the project has none."""
    for site in facts.sites_of("from_pretrained"):
        owner = shown(site.receiver) if site.receiver is not None else ""
        if owner.endswith("ForCausalLM"):
            return f"{owner}.from_pretrained()"
    return ""


def _number(function: Function, node: ast.expr | None) -> float | None:
    node = value_of(function, node)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    return None


def _argument(facts: Facts, site: Site, report: Report) -> None:
    """ENV503: the argument that torch.distributed.launch passed."""
    first = site.call.args[0] if site.call.args else None
    if not isinstance(first, ast.Constant) or first.value not in ("--local_rank", "--local-rank"):
        return
    if not facts.project.has_text("LOCAL_RANK"):
        report.at("ENV503", site, f"the argument {first.value}")


_HANDLERS: dict[str, Callable[[Facts, Site, Report], None]] = {
    "init_process_group": _init_group,
    "DataParallel": _data_parallel,
    "_set_static_graph": _static_graph_method,
    "save": _save,
    "from_pretrained": _from_pretrained,
    "load_state_dict": _load,
    "add_argument": _argument,
    **dict.fromkeys(("Adam", "AdamW", "AdamW8bit", "Adam8bit", "PagedAdamW", "PagedAdamW8bit",
                     "TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments"), _rate),
}  # fmt: skip


def _check_device(facts: Facts, site: Site, report: Report) -> None:
    """ENV504: `cuda:0` in calls that place something there."""
    if not facts.project.imports(*_DISTRIBUTED) or facts.runs_on_some_ranks(site):
        return
    values = [*site.call.args, *(k.value for k in site.call.keywords)]
    hard = [v for v in values if isinstance(v, ast.Constant) and v.value == "cuda:0"]
    zero = [v for v in site.call.args if isinstance(v, ast.Constant) and v.value == 0]
    sets = site.name == "torch.cuda.set_device" or (site.method == "cuda" and not site.name)
    is_int = bool(zero) and not isinstance(getattr(zero[0], "value", None), bool)
    places = ("device", "to", "load", "tensor", "zeros", "ones", "empty", "randn", "rand")
    if (hard and (site.method in places or site.name.startswith("torch."))) or (sets and is_int):
        report.at("ENV504", site, shown(site.call))


def _check_environment(facts: Facts, function: Function, report: Report) -> None:
    """ENV501 and ENV503: variables that the script sets, launchers that it starts."""
    for binding in function.bindings:
        target = binding.target
        if isinstance(target, ast.Subscript):
            owner = facts.project.resolve(function.module, target.value)
            _check_variable(owner == "os.environ", target.slice, target, function, report)
    for site in function.sites:
        sets = site.name in ("os.environ.setdefault", "os.putenv")
        if site.call.args:
            _check_variable(sets, site.call.args[0], site.call, function, report)
        if site.name == "os.environ.update":
            keys: list[ast.expr] = [ast.Constant(k.arg) for k in site.call.keywords]
            for argument in site.call.args:
                keys += [k for k in getattr(argument, "keys", []) if isinstance(k, ast.expr)]
            for key in keys:
                _check_variable(True, key, site.call, function, report)
        if site.name.startswith(("subprocess.", "os.")) and site.call.args:
            text = ast.unparse(site.call.args[0])
            if "torch.distributed.launch" in text:
                report.at("ENV503", site, "torch.distributed.launch")


def _check_variable(
    sets: bool, key: ast.expr, node: ast.expr, function: Function, report: Report
) -> None:
    if sets and isinstance(key, ast.Constant) and (effect := INEFFECTIVE.get(str(key.value))):
        fix = f"write {effect.instead}"
        report.add("ENV501", function.module, node, str(key.value), why=effect.why, fix=fix)


def _check_imports(facts: Facts, report: Report) -> None:
    for module in facts.project.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module == "torch.utils.checkpoint":
                if any(name.name == "checkpoint_wrapper" for name in node.names):
                    what = "checkpoint_wrapper from torch.utils.checkpoint"
                    report.add("IMP405", module, node, what)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or "", *(n.name for n in node.names)]
                if "torch.distributed.launch" in names:
                    report.add("ENV503", module, node, "torch.distributed.launch")
            elif (
                isinstance(node, ast.Attribute)
                and node.attr == "checkpoint_wrapper"
                and facts.project.resolve(module, node).startswith("torch.utils.checkpoint.")
            ):
                report.add("IMP405", module, node, shown(node))


def _check_scaler(facts: Facts, report: Report) -> None:
    """NUM401, for projects that train and have no scaler of their own or of a framework."""
    if facts.sites_of(*_SCALERS) or not facts.sites_of("backward"):
        return
    for site in facts.sites_of("autocast", "MixedPrecisionPolicy", "MixedPrecision"):
        if not site.name.startswith("torch."):
            continue
        node = site.argument("dtype", 1) or site.argument("param_dtype", 0)
        if "GradScaler" in ast.unparse(site.function.node) or _is_off(site):
            continue
        if site.last == "autocast":
            node = site.argument("dtype") or _second(site)
            default = ".cuda." in site.name or _device_of(site) == "cuda"
            is_half = default if node is None else dtype_of(facts, site.function, node) == "float16"
        else:
            is_half = dtype_of(facts, site.function, node) == "float16"
        if is_half:
            what = f"{shown(site.call)} without GradScaler"
            report.at("NUM401", site, what)


def _second(site: Site) -> ast.expr | None:
    """The dtype as the second argument of torch.autocast; torch.cuda.amp.autocast has it third."""
    return None if ".cuda." in site.name else site.argument("dtype", 1)


def _device_of(site: Site) -> str:
    first = site.argument("device_type", 0)
    return str(first.value) if isinstance(first, ast.Constant) else ""


def _is_off(site: Site) -> bool:
    enabled = site.argument("enabled")
    return isinstance(enabled, ast.Constant) and not enabled.value


def _check_autocast(facts: Facts, report: Report) -> None:
    if not facts.uses(DDP) or facts.sites_of("register_comm_hook"):
        return
    for site in facts.sites_of("autocast"):
        if site.name.startswith("torch.") and not _is_off(site):
            dtype = dtype_of(facts, site.function, site.argument("dtype") or _second(site))
            if dtype == "bfloat16":
                report.at("DDP304", site, shown(site.call))
                return


def _check_sampler(facts: Facts, report: Report) -> None:
    if facts.sites_of("set_epoch"):
        return
    loops = [loop for site in facts.sites for loop in site.context.loops]
    epochs = any(isinstance(x, ast.For) and "epoch" in ast.unparse(x.target) for x in loops)
    for site in facts.sites_of("DistributedSampler"):
        shuffle = site.argument("shuffle", 3)
        is_off = isinstance(shuffle, ast.Constant) and not shuffle.value
        if epochs and site.name.startswith("torch.utils.data.") and not is_off:
            report.at("DATA404", site, f"{shown(site.call)}")


def _check_static_graph(facts: Facts, report: Report) -> None:
    """DDP303: static_graph=True, and a forward() with a branch on a tensor or a random number."""
    for site in facts.sites_of("DistributedDataParallel"):
        if not site.is_true("static_graph"):
            continue
        for function in facts.functions:
            if not function.name.endswith(".forward") or isinstance(function.node, ast.Module):
                continue
            for node in ast.walk(function.node):
                if isinstance(node, (ast.If, ast.While, ast.IfExp)) and _tests_data(node.test):
                    where = f"{function.module.path.name}:{node.lineno}"
                    what = f"static_graph=True, and the branch {shown(node.test, 40)} of {where}"
                    report.at("DDP303", site, what)


def _tests_data(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return (
        re.search(r"\.(item|any|all|sum|mean|max|min)\(|\brandom|\brand\(|bernoulli", text)
        is not None
    )

"""The launchers of other systems: their options, and what becomes of each when Holdfast starts the
script that the launcher would start.

Sources: torch/distributed/run.py of torch 2.11 to 2.15; accelerate/commands/launch.py of accelerate
1.15; deepspeed/launcher/runner.py and launch.py of DeepSpeed 0.19; swift/cli/main.py of ms-swift
4.6.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, NoReturn

from holdfast.orchestrator.errors import Problem

from .launcher_names import launched

FIELD = "command"
"""Relative to the entrypoint, as its validator names a field."""

STARTS_RANKS = "Holdfast starts the ranks; write the line that it would start on one of them"
SizeOf = Literal["nodes", "workers", "world", "restarts"]
Use = Literal[
    "nodes",  # compared with spec.nodes
    "workers",  # compared with spec.workersPerNode
    "world",  # compared with the product of both
    "restarts",  # compared with spec.recovery.budgets
    "module",  # the word is a module
    "program",  # the word is a program and no Python file
    "plain",  # changes nothing here
    "replaced",  # Holdfast does this itself
    "kept",  # handed on to accelerate's own code
    "no-local-rank",
    "refused",
]


class CommandRefused(ValueError):
    """A command that Holdfast does not start; the text has the form `got; expected; fix`."""

    def __init__(self, got: str, expected: str, fix: str = "") -> None:
        self.problem = Problem(FIELD, got, expected, fix)
        super().__init__(str(self.problem))


@dataclass(frozen=True)
class Size:
    """A number of processes or restarts that a launcher's option gives."""

    of: SizeOf
    option: str
    """The option as written."""
    least: int
    most: int


class Option(NamedTuple):
    names: tuple[str, ...]
    use: Use
    has_value: bool = True
    fix: str = ""
    """The fix of a rejected option."""


@dataclass(frozen=True)
class Program:
    """Program of each worker: a script, a module, or the words of another program."""

    script: str | None = None
    module: str | None = None
    words: tuple[str, ...] = ()
    """Words of a program that Holdfast's Python does not run."""
    args: tuple[str, ...] = ()
    """Arguments of the script or module."""
    python: str = ""
    """Interpreter, or directory of an environment; "": the one of the workers."""
    runner: tuple[str, ...] = ()
    """Words that run a command in an environment, such as `uv run`; python follows them."""
    env: dict[str, str] = field(default_factory=dict)
    launcher: str = ""
    launcher_args: tuple[str, ...] = ()
    """Arguments for accelerate's own code, which turns them into variables."""
    local_rank_option: str = ""
    """The option with which the launcher gives the script its local rank; "": none."""
    sizes: tuple[Size, ...] = ()
    replaced: tuple[str, ...] = ()
    """Options of the launcher that Holdfast replaces."""
    counts: str = ""
    """Part of the line that would count a machine's devices; "": the line has the number."""

    @property
    def is_foreign(self) -> bool:
        """True if another program than the forked worker runs: no warm start."""
        return bool(self.words or self.python or self.runner)

    def with_arguments(self, words: Iterable[str]) -> Program:
        """The same with further arguments at the end."""
        if self.words:
            return replace(self, words=(*self.words, *words))
        return replace(self, args=(*self.args, *words))

    def __str__(self) -> str:
        return self.script or self.module or shlex.join(self.words)


def _options(
    use: Use, *names: str, has_value: bool = True, fix: str = "", dashed: bool = True
) -> list[Option]:
    """One option for each name; `a/b` are two spellings. With `dashed`, also with _ for -."""
    options = []
    for name in names:
        spellings = [f"-{n}" if len(n) == 1 else f"--{n}" for n in name.split("/")]
        if dashed:
            spellings += ["--" + s[2:].replace("-", "_") for s in spellings if "-" in s[2:]]
        options.append(Option(tuple(spellings), use, has_value, fix))
    return options


TORCHRUN = (
    *_options("nodes", "nnodes"),
    *_options("workers", "nproc-per-node"),
    *_options("restarts", "max-restarts"),
    *_options("module", "module/m", has_value=False),
    *_options("program", "no-python", has_value=False),
    *_options("plain", "run-path", has_value=False),
    *_options("replaced", "standalone", has_value=False),
    *_options(
        "replaced", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank",
        "master-addr", "master-port", "local-addr", "monitor-interval", "start-method",
        "event-log-handler", "role", "signals-to-handle", "shutdown-timeout",
        "log-dir", "redirects/r", "tee/t", "log-line-prefix-template", "local-ranks-filter",
        "duplicate-stdout-filters", "duplicate-stderr-filters",
    ),
    *_options("refused", "logs-specs", fix="remove it: `holdfast logs` shows each rank's output"),
    *_options("refused", "numa-binding", fix="remove it; the session binds a rank to its GPU's "
              "cores"),
    *_options("refused", "virtual-local-rank", has_value=False,
              fix="remove it; LOCAL_RANK is the worker's number on its node"),
)  # fmt: skip

ACCELERATE = (
    *_options("world", "num-processes"),
    *_options("nodes", "num-machines"),
    *_options("restarts", "max-restarts"),
    *_options("module", "module/m", has_value=False),
    *_options("program", "no-python", has_value=False),
    *_options("plain", "quiet/q", "same-network", has_value=False),
    *_options(
        "replaced", "machine-rank", "main-process-ip", "main-process-port", "tee/t", "log-dir",
        "role", "rdzv-backend", "rdzv-conf", "monitor-interval", "main-training-function",
        "deepspeed-hostfile", "deepspeed-multinode-launcher", "mpirun-hostfile",
    ),
    *_options("refused", "gpu-ids", fix="write spec.env.CUDA_VISIBLE_DEVICES instead"),
    *_options("refused", "num-cpu-threads-per-process", fix="write spec.env.OMP_NUM_THREADS or "
              "spec.resources.cpu instead"),
    *_options("refused", "deepspeed-exclusion-filter", "deepspeed-inclusion-filter",
              fix="remove it: Holdfast chooses the nodes"),
    *_options("refused", "tpu", "tpu-cluster", "no-tpu-cluster", "tpu-use-sudo", has_value=False,
              fix="Holdfast trains on GPUs and CPUs only"),
    *_options("refused", "vm", "env", "aws-access-key-id", "aws-secret-access-key",
              fix="remove it; variables belong into spec.env"),
    *_options(
        "kept", "cpu", "multi-gpu", "enable-cpu-affinity", "dynamo-use-fullgraph",
        "dynamo-use-dynamic", "dynamo-use-regional-compilation", "use-deepspeed", "use-fsdp",
        "use-parallelism-config", "use-megatron-lm", "downcast-bf16", "debug",
        "fp8-use-autocast-during-eval", has_value=False,
    ),
    *_options(
        "kept", "config-file", "mixed-precision", "dynamo-backend", "dynamo-mode",
        "deepspeed-config-file", "zero-stage", "offload-optimizer-device", "offload-param-device",
        "offload-optimizer-nvme-path", "offload-param-nvme-path", "gradient-accumulation-steps",
        "gradient-clipping", "zero3-init-flag", "zero3-save-16bit-model",
        "deepspeed-moe-layer-cls-names",
        *(
            f"fsdp-{name}" for name in (
                "version", "offload-params", "min-num-params", "sharding-strategy",
                "reshard-after-forward", "auto-wrap-policy", "transformer-layer-cls-to-wrap",
                "backward-prefetch", "state-dict-type", "forward-prefetch", "use-orig-params",
                "cpu-ram-efficient-loading", "sync-module-states", "activation-checkpointing",
                "activation-checkpointing-offload",
            )
        ),
        *(
            f"megatron-lm-{name}" for name in (
                "tp-degree", "use-custom-fsdp", "no-load-optim", "eod-mask-loss",
                "overlap-cpu-optimizer-d2h-h2d", "no-save-optim", "optimizer-cpu-offload",
                "use-precision-aware-optimizer", "decoder-last-pipeline-num-layers", "pp-degree",
                "num-micro-batches", "sequence-parallelism", "recompute-activations",
                "use-distributed-optimizer", "gradient-clipping", "recompute-granularity",
                "recompute-method", "recompute-num-layers", "attention-backend",
                "expert-model-parallel-size", "context-parallel-size", "attention-dropout",
                "hidden-dropout", "attention-softmax-in-fp32", "expert-tensor-parallel-size",
                "calculate-per-token-loss", "use-rotary-position-embeddings",
            )
        ),
        *(
            f"fp8-{name}" for name in (
                "backend", "margin", "interval", "format", "amax-history-len",
                "amax-compute-algo", "override-linear-precision", "opt-level",
                "enable-fsdp-float8-all-gather", "pad-inner-dim",
            )
        ),
        *(
            f"parallelism-config-{name}" for name in (
                "dp-replicate-size", "dp-shard-size", "tp-size", "cp-size", "cp-backend",
                "cp-comm-strategy", "sp-size", "sp-backend", "sp-seq-length",
                "sp-seq-length-is-variable", "sp-attn-implementation",
            )
        ),
    ),
)  # fmt: skip

DEEPSPEED = (
    *_options("nodes", "num_nodes", dashed=False),
    *_options("workers", "num_gpus/num_accelerators", dashed=False),
    *_options("module", "module", has_value=False),
    *_options("program", "no_python", has_value=False, dashed=False),
    *_options("no-local-rank", "no_local_rank", has_value=False, dashed=False),
    *_options("plain", "no_ssh", "no_ssh_check", "force_multi", "quiet/q", has_value=False,
              dashed=False),
    *_options("replaced", "master_port", "master_addr", "node_rank", "launcher", "launcher_args",
              "ssh_port", "log_level", "enable_each_rank_log", "hostfile/H", dashed=False),
    *_options("replaced", "save_pid", has_value=False, dashed=False),
    *_options("refused", "include/i", "exclude/e", dashed=False,
              fix="remove it: Holdfast chooses the nodes; for GPUs of a node write "
              "spec.env.CUDA_VISIBLE_DEVICES"),
    *_options("refused", "autotuning", dashed=False, fix="tune with DeepSpeed first"),
    *_options("refused", "bind_cores_to_rank", has_value=False, dashed=False,
              fix="remove it; spec.resources.cpu sets the number of threads"),
    *_options("refused", "bind_core_list", dashed=False,
              fix="remove it; spec.resources.cpu sets the number of threads"),
    *_options("refused", "venv_script", dashed=False,
              fix="write entrypoint.python: DIRECTORY_OF_THE_VENV instead"),
)  # fmt: skip

LAUNCH = (
    *TORCHRUN,
    *_options("no-local-rank", "use-env", has_value=False),
)
"""torch.distributed.launch: it passes --local-rank to the script, unless --use-env is given."""

NAMES = {
    "torchrun": TORCHRUN,
    "accelerate launch": ACCELERATE,
    "deepspeed": DEEPSPEED,
    "torch.distributed.launch": LAUNCH,
    "swift": (),
}
SWIFT_SIZES: dict[str, SizeOf] = {"NPROC_PER_NODE": "workers", "NNODES": "nodes"}
SWIFT_REPLACED = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that `swift sft` hands to torchrun as options."""
LOCAL_RANK = {"deepspeed": "--local_rank", "torch.distributed.launch": "--local-rank"}
"""Launcher -> the option with which it gives a script its local rank."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, launcher: str) -> None:
        super().__init__(prog=launcher, add_help=False, argument_default=argparse.SUPPRESS)
        self._launcher = launcher

    def error(self, message: str) -> NoReturn:
        if "required: script" in message:
            raise CommandRefused(f"{self._launcher} without a script", "the script that it starts")
        raise CommandRefused(
            f"{self._launcher} with {message}",
            "options of it that Holdfast knows",
            "remove it, or start the script itself: each rank has torchrun's variables",
        )


def read(launcher: str, words: list[str]) -> Program:
    """Program that `launcher WORDS` would start. Raises CommandRefused."""
    options = {f"option{number}": option for number, option in enumerate(NAMES[launcher])}
    parser = _Parser(launcher)
    for dest, option in options.items():
        if option.has_value:
            parser.add_argument(*option.names, dest=dest)
        else:
            parser.add_argument(*option.names, dest=dest, action="store_true")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    ns, unknown = parser.parse_known_args(words)
    if launcher == "swift" and not unknown:
        return _swift_program(ns.script, tuple(ns.args))
    if unknown:
        parser.error(f"the unknown option {unknown[0]}")
    pairs = [(option, vars(ns)[dest]) for dest, option in options.items() if dest in vars(ns)]
    own = words[: len(words) - len(ns.args) - 1]
    return _launched(launcher, ns.script, tuple(ns.args), pairs, own)


def _swift_program(verb: str, args: tuple[str, ...]) -> Program:
    """`swift sft ARGS` runs a module; a file of arguments is read by the program itself."""
    if args and args[0].endswith((".json", ".yaml", ".yml")):
        raise CommandRefused(
            f"swift {verb} {args[0]}", "options", "write the values of the file as options"
        )
    line = " ".join(args).replace("=", " ").lower()
    if "--add_version false" not in line:
        raise CommandRefused(
            f"swift {verb} without --add_version false",
            "a start that finds the checkpoints of the one before, in the same directory",
            "add `--add_version false` and --output_dir",
        )
    return Program(module=f"swift.cli.{verb.replace('-', '_')}", args=args, launcher="swift")


def swift_variables(env: dict[str, str]) -> tuple[tuple[Size, ...], tuple[str, ...], str]:
    """(Sizes, what Holdfast replaces, what would count devices) of the variables before `swift`;
    they are taken out of `env`."""
    sizes, counts = [], ""
    for name, of in SWIFT_SIZES.items():
        if name in env:
            value = env.pop(name)
            size = _size(of, f"{name}={value}", value)
            if size is not None:
                sizes.append(size)
            else:
                counts = f"{name}={value}"
    replaced = tuple(f"{name}={env.pop(name)}" for name in SWIFT_REPLACED if name in env)
    return tuple(sizes), (*replaced, *([counts] if counts else [])), counts


def _launched(
    launcher: str,
    word: str,
    args: tuple[str, ...],
    given: list[tuple[Option, str]],
    own: list[str],
) -> Program:
    """`own`: the words of the line that are the launcher's."""
    sizes, replaced, kept = [], [], []
    counts = launcher if launcher in _COUNTING else ""
    spelt = {option.partition("=")[0] for option in own}
    for option, value in given:
        name = next((name for name in option.names if name in spelt), option.names[0])
        written = f"{name}={value}" if option.has_value else name
        match option.use:
            case "nodes" | "workers" | "world" | "restarts":
                size = _size(option.use, written, value)
                if size is None:
                    replaced.append(written)
                    counts = written
                else:
                    counts = "" if size.of in ("workers", "world") else counts
                    sizes.append(size)
            case "replaced":
                replaced.append(written)
            case "kept":
                kept += [option.names[0], value] if option.has_value else [option.names[0]]
            case "refused":
                raise CommandRefused(f"{launcher} with {written}", "it without", option.fix)
            case _:
                pass
    uses = {option.use for option, _value in given}
    program = Program(
        launcher=launcher,
        launcher_args=tuple(kept),
        sizes=tuple(sizes),
        replaced=tuple(replaced),
        counts=counts,
    )
    if "program" in uses:
        return replace(program, words=(word, *args))
    if inner := launched([word, *args])[0]:
        raise CommandRefused(f"{inner} behind {launcher}", "one of both", STARTS_RANKS)
    local_rank = LOCAL_RANK.get(launcher, "") if "no-local-rank" not in uses else ""
    script, module = (None, word) if "module" in uses else (word, None)
    return replace(program, script=script, module=module, args=args, local_rank_option=local_rank)


_COUNTING = ("accelerate launch", "deepspeed")
"""Launchers that count devices where no option has the number of processes."""
_MACHINE_DECIDES = ("auto", "gpu", "cpu", "xpu", "-1")
"""Values with which torchrun and deepspeed count the devices of the machine."""


def _size(of: SizeOf, written: str, value: str) -> Size | None:
    """None: the launcher would count devices."""
    if of == "workers" and value in _MACHINE_DECIDES:
        return None
    match = re.fullmatch(r"(\d+)(?::(\d+))?", value)
    if match is None or (match[2] and of != "nodes"):
        expected = "a number" if of != "nodes" else "a number, or MIN:MAX"
        raise CommandRefused(written, expected, "or remove the option: the spec has the sizes")
    least = int(match[1])
    return Size(of, written, least, int(match[2] or least))

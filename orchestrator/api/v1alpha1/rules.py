"""Checks as CEL rules in the CRD: immutable fields, and mistakes that the API server can reject.

Each rule repeats a validator of the models in the same words; tests apply the same wrong document
to both. An admission policy of the chart checks what needs the chart's settings or has no type
here. All other checks (the rest of the mesh and the settings of recipes) are the models' alone: the
operator reports them as condition InvalidSpec.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .base import Choice, yaml_name
from .job import CONTRACT_NAMES, RESERVED_PREFIXES, JobSpec
from .parallelism import ActivationCheckpointing, Parallelism
from .resilience import OwnCheckpointGuard
from .workload import BESIDE, Entrypoint


@dataclass(frozen=True)
class Rule:
    """One rule of the schema.

    `path` is the dotted path of the node that has the rule, "" for the whole object. `message` has
    the form `field: got X; expected Y; fix` with a %s for each of `values`, which are CEL
    expressions. `field` is the field that the API server names, below path. With `optional_old` the
    rule can read the old object if there is one.
    """

    name: str
    path: str
    rule: str
    message: str
    values: tuple[str, ...] = ()
    field: str = ""
    optional_old: bool = False

    def message_expression(self) -> str:
        """The message as CEL. By `format`: the cost of concatenation has no bound."""
        values = ", ".join(f"dyn({value})" for value in self.values)
        return f"{_text(self.message)}.format([{values}])"


MUTABLE = ("nodes", "code", "elasticity", "recovery", "suspend", "ttlSecondsAfterFinished")
"""Fields of the spec that a running job follows (core/requests.py). A change of any other field
would reach the workers of one generation and not those of another, or have no effect."""

WHILE_SUSPENDED = ("kubernetes", "queue", "priority")
"""Fields of the pods' place and time, which may also change in a suspended job without pods."""

ALWAYS_IMMUTABLE = ("managedBy",)
"""Fields that cannot change even before the start: two controllers would each own the job."""


def _text(value: str) -> str:
    """A CEL string literal."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


_RESERVED = " || ".join(
    [
        f"name in [{', '.join(_text(name) for name in CONTRACT_NAMES)}]",
        *(f"name.startsWith({_text(prefix)})" for prefix in RESERVED_PREFIXES),
    ]
)
_WELL_FORMED = "name.matches('^[A-Za-z_][A-Za-z0-9_]*$')"


def _one_choice(name: str, path: str, part: type[Choice]) -> Rule:
    written = "[" + ", ".join(f"has(self.{c})" for c in part.choices) + "].filter(given, given)"
    words = "'none of them'"
    for count in range(1, len(part.choices) + 1):
        for names in itertools.combinations(part.choices, count):
            present = " && ".join(f"has(self.{choice})" for choice in names)
            words = f"{present} ? {_text(' and '.join(names))} : {words}"
    sign = "<=" if part.default_choice else "=="
    message = f"{path}: got %s; expected {part.one_of()}"
    return Rule(name, path, f"size({written}) {sign} 1", message, (words,))


def _excluded() -> Iterator[Rule]:
    for (kind, name), problem in BESIDE.items():
        field = yaml_name(name)
        rule = f"!has(self.{kind}) || !has(self.{field}) || size(self.{field}) == 0"
        label, where = f"no-{field}-beside-a-{kind}", "spec.entrypoint"
        yield Rule(label, where, rule, f"{where}: {problem}", field=f".{field}")


# The size of the mesh, which `kubectl scale` changes.
_WORLD = "(self.nodes.max * self.workersPerNode)"
_PIPELINE = "(has(self.parallelism.pipeline) ? self.parallelism.pipeline.ranks : 1)"
_INNER = f"(self.parallelism.tensor * self.parallelism.context * {_PIPELINE})"
_SHARD = "self.parallelism.shard"
_GPUS = "int(self.resources.gpu) * self.workersPerNode"

CHECKS = (
    Rule(
        "name",
        "",
        "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && "
        "size(self.metadata.name) <= 52",
        "metadata.name: got %s; expected at most 52 lower-case letters, digits and dashes, "
        "beginning and ending with no dash; pods are named after the job",
        ("self.metadata.name",),
        ".metadata.name",
    ),
    _one_choice("one-entrypoint", "spec.entrypoint", Entrypoint),
    _one_choice(
        "one-activation-checkpointing",
        "spec.parallelism.activationCheckpointing",
        ActivationCheckpointing,
    ),
    _one_choice("one-way-of-sharding", "spec.parallelism", Parallelism),
    _one_choice("one-guard", "spec.checkpoint.guard", OwnCheckpointGuard),
    *_excluded(),
    Rule(
        "a-node-at-least",
        "spec.nodes",
        "self.max >= 1",
        "spec.nodes.max: got %s; expected greater than or equal to 1; for no nodes set suspend: "
        "true",
        ("self.max",),
        ".max",
    ),
    Rule(
        "one-gpu-for-a-recipe",
        "spec",
        "!has(self.entrypoint.recipe) || type(self.resources.gpu) != int || "
        "int(self.resources.gpu) <= 1",
        "spec.resources.gpu: got %s for a recipe; expected auto, 0 or 1: a recipe trains on one "
        "GPU per worker; for all %s GPUs of a node write workersPerNode: %s and gpu: 1",
        ("self.resources.gpu", _GPUS, _GPUS),
        ".resources.gpu",
    ),
    # `kubectl scale` below nodes.min changes nodes.max alone, and job_from_resource lowers
    # nodes.min.
    Rule(
        "min-at-most-max",
        "spec.nodes",
        "self.min <= self.max || (oldSelf.hasValue() && oldSelf.value().min == self.min)",
        "spec.nodes.max: got %s; expected at least nodes.min (%s)",
        ("self.max", "self.min"),
        ".max",
        optional_old=True,
    ),
    Rule(
        "one-interval",
        "spec.checkpoint.storage",
        "!has(self.everySteps) || !has(self.everySeconds)",
        "spec.checkpoint.storage: got everySteps and everySeconds; expected at most one of them",
    ),
    Rule(
        "shared-checkpoint-path",
        "spec.checkpoint",
        "!has(self.path) || "
        "!(self.path.startsWith('memory://') || self.path.contains('::memory://'))",
        "spec.checkpoint.path: got %s; expected a directory or the URL of a store; memory:// is "
        "the memory of a single process, and a job has many",
        ("self.path",),
        ".path",
    ),
    Rule(
        "complete-checkpoint-url",
        "spec.checkpoint",
        "!has(self.path) || !self.path.matches('^[^/]*://+$')",
        "spec.checkpoint.path: got %s; expected a bucket or a directory after ://, such as "
        "s3://bucket/prefix",
        ("self.path",),
        ".path",
    ),
    Rule(
        "no-password-in-a-path",
        "spec.checkpoint",
        "!has(self.path) || !self.path.matches('^[^/]*://[^/]*:[^/]*@')",
        "spec.checkpoint.path: got a URL with a password in it; expected a URL without; put "
        "credentials into the environment or spec.env: paths are printed",
        field=".path",
    ),
    Rule(
        "heartbeat-timeout",
        "spec.recovery",
        "self.heartbeatTimeoutSeconds >= 2.0 * self.heartbeatIntervalSeconds",
        "spec.recovery.heartbeatTimeoutSeconds: got %s; expected at least twice "
        "heartbeatIntervalSeconds (%s)",
        ("self.heartbeatTimeoutSeconds", "2.0 * self.heartbeatIntervalSeconds"),
        ".heartbeatTimeoutSeconds",
    ),
    Rule(
        "no-reserved-variable",
        "spec.env",
        f"!self.exists(name, {_RESERVED})",
        "spec.env.%s: got a variable that Holdfast sets for each worker; expected any other name; "
        "remove it: ranks and addresses change with every generation",
        (f"self.filter(name, {_RESERVED})[0]",),
    ),
    Rule(
        "variable-names",
        "spec.env",
        f"self.all(name, {_WELL_FORMED})",
        "spec.env: got the name %s; expected letters, digits and underscores",
        (f"self.filter(name, !{_WELL_FORMED})[0]",),
    ),
    Rule(
        "mesh-fits-the-world",
        "spec",
        f"{_WORLD} % {_INNER} == 0",
        "spec.parallelism: got %s for tensor x context x pipeline; expected a divisor of %s "
        "workers (nodes.max %s x workersPerNode %s)",
        (_INNER, _WORLD, "self.nodes.max", "self.workersPerNode"),
        ".parallelism",
    ),
    Rule(
        "shard-divides",
        "spec",
        f"type({_SHARD}) != int || {_WORLD} % {_INNER} != 0 || "
        f"{_WORLD} / {_INNER} % int({_SHARD}) == 0",
        "spec.parallelism.shard: got %s; expected a divisor of %s workers (nodes.max %s x "
        "workersPerNode %s, by the other axes)",
        (_SHARD, f"{_WORLD} / {_INNER}", "self.nodes.max", "self.workersPerNode"),
        ".parallelism.shard",
    ),
    Rule(
        "tensor-within-a-node",
        "spec",
        "!has(self.entrypoint.recipe) || self.parallelism.tensorOverNodes || "
        "self.workersPerNode % self.parallelism.tensor == 0",
        "spec.parallelism.tensor: got %s; expected a divisor of workersPerNode (%s): every layer "
        "waits for this axis, here for the network between nodes; set parallelism.tensorOverNodes: "
        "true if that is meant",
        ("self.parallelism.tensor", "self.workersPerNode"),
        ".parallelism.tensor",
    ),
)

_STARTED = "has(self.status) && has(self.status.jobId)"
"""The operator has started the job. Until then, for example after a refusal, the spec may
change."""


_SUSPENDED = (
    "has(self.status) && has(self.status.state) && self.status.state == 'suspended' && "
    "has(oldSelf.spec.suspend) && oldSelf.spec.suspend && has(self.spec.suspend) && "
    "self.spec.suspend"
)
"""The job has no pods, before and after this change."""


def _immutable() -> Iterator[Rule]:
    for name, field in JobSpec.model_fields.items():
        yaml_name = field.alias or name
        if yaml_name in MUTABLE:
            continue
        new, old = f"self.spec.{yaml_name}", f"oldSelf.spec.{yaml_name}"
        unless = "" if yaml_name in ALWAYS_IMMUTABLE else f"!({_STARTED}) || "
        how = "to change it delete the job and apply it again: checkpoints at a path of your own"
        if yaml_name in WHILE_SUSPENDED:
            unless += f"({_SUSPENDED}) || "
            how = "suspend the job to change it, or delete it and apply it again: checkpoints"
        yield Rule(
            f"immutable-{yaml_name}",
            "",
            f"{unless}has({new}) == has({old}) && (!has({new}) || {new} == {old})",
            f"spec.{yaml_name}: got a changed value; expected the one that the job was started "
            f"with; {how} are kept",
            field=f".spec.{yaml_name}",
        )


RULES: tuple[Rule, ...] = (*CHECKS, *_immutable())

"""The checks across fields as CEL rules, for an API server: what the models' validators say.

Owns: the rules and the text that a user sees. Must not: be a second opinion: each rule says what a
validator of the models says, and tests apply the same wrong document to both.

What CEL in a CRD cannot check is left to the operator's condition (reason InvalidSpec) and, where
the cluster has it, to the chart's validating admission policy:
* fields that are a number or a word, or a number or a boolean (recovery.hangTimeoutSeconds,
  parallelism.reshardAfterForward, quantities): a structural schema has no type for them, and CEL
  sees no field without a type; the schema restricts their values instead;
* that reshardAfterForward divides the shard group, for the same reason;
* the pod template: it is a pod, whose schema is not ours;
* files, directories, modules and storage: only the pods can look.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .env import CONTRACT_NAMES, RESERVED_PREFIXES
from .job import JobSpec


@dataclass(frozen=True)
class Rule:
    """One rule at one place of the schema.

    `path` is dotted, "" for the whole object. `message` has the form `field: got X; expected Y;
    fix` with a %s for each of `values`, which are CEL expressions. `field` is the place that an API
    server names, below path. `optional_old`: the rule looks at the old object where there is one.
    """

    name: str
    path: str
    rule: str
    message: str
    values: tuple[str, ...] = ()
    field: str = ""
    optional_old: bool = False

    def message_expression(self) -> str:
        """The message as CEL. By `format`: the cost of concatenation has no bound there."""
        values = ", ".join(f"dyn({value})" for value in self.values)
        return f"{_text(self.message)}.format([{values}])"


MUTABLE = ("nodes", "recovery", "suspend", "ttlSecondsAfterFinished")
"""Fields of the spec that may change once the job has been started, because it follows them (see
core/requests.py). All others are part of every launch, or were read at the start: a change would
reach the workers of one generation and not those of another, make the checkpoints another job's, or
do nothing without a word."""

FIXED_FROM_THE_FIRST = ("managedBy",)
"""Not even before the start: two controllers would each believe that the job is theirs."""

_DIVISORS = "[" + ", ".join(str(n) for n in range(1, 65)) + "]"
"""Of workersPerNode, which is at most 64. CEL has neither ranges nor a greatest common divisor."""


def _text(value: str) -> str:
    """A CEL string literal."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _names(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(_text(value) for value in values) + "]"


# -- one field, or fields of one part ----------------------------------------------------------
_KINDS = ("script", "module", "recipe")
_GIVEN = "[" + ", ".join(f"has(self.{kind})" for kind in _KINDS) + "].filter(given, given)"
_MODEL = "spec.entrypoint.recipe.config.model"
_KV_HEADS = "(has(self.numKvHeads) ? self.numKvHeads : self.numHeads)"
_RESERVED = " || ".join(f"name.startsWith({_text(prefix)})" for prefix in RESERVED_PREFIXES)
_TAKEN = f"name in {_names(CONTRACT_NAMES)} || {_RESERVED}"
_SHAPED = "name.matches('^[A-Za-z_][A-Za-z0-9_]*$')"


def _entrypoints_given() -> str:
    """Those that stand there, in words."""
    expression = "'none of them'"
    for count in (1, 2, 3):
        for kinds in itertools.combinations(_KINDS, count):
            given = " && ".join(f"has(self.{kind})" for kind in kinds)
            expression = f"{given} ? {_text(' and '.join(kinds))} : {expression}"
    return expression


def _auto_or_positive(path: str, name: str) -> Rule:
    return Rule(
        f"auto-or-number-{name}",
        path,
        f"type(self.{name}) == string ? self.{name} == 'auto' : self.{name} >= 1",
        f"{path}.{name}: got %s; expected auto or a number >= 1",
        (f"self.{name}",),
        f".{name}",
    )


PARTS = (
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
    Rule(
        "one-entrypoint",
        "spec.entrypoint",
        f"size({_GIVEN}) == 1",
        "spec.entrypoint: got %s; expected exactly one of script, module, recipe",
        (_entrypoints_given(),),
    ),
    Rule(
        "no-args-beside-a-recipe",
        "spec.entrypoint",
        "!has(self.recipe) || !has(self.args) || size(self.args) == 0",
        "spec.entrypoint: got args beside a recipe; expected recipe.config instead",
        field=".args",
    ),
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
        "one-cadence",
        "spec.checkpoint.storage",
        "!has(self.everySteps) || !has(self.everySeconds)",
        "spec.checkpoint.storage: got everySteps and everySeconds; expected at most one of them",
    ),
    Rule(
        "checkpoints-are-shared",
        "spec.checkpoint",
        "!has(self.path) || "
        "!(self.path.startsWith('memory://') || self.path.contains('::memory://'))",
        "spec.checkpoint.path: got %s; expected a directory or the URL of a store; memory:// is "
        "the memory of a single process, and a job has many",
        ("self.path",),
        ".path",
    ),
    Rule(
        "urls-say-where",
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
        "beats-fit",
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
        f"!self.exists(name, {_TAKEN})",
        "spec.env.%s: got a variable that Holdfast sets for each worker; expected any other name; "
        "remove it: ranks and addresses change with every generation",
        (f"self.filter(name, {_TAKEN})[0]",),
    ),
    Rule(
        "variables-have-names",
        "spec.env",
        f"self.all(name, {_SHAPED})",
        "spec.env: got the name %s; expected letters, digits and underscores",
        (f"self.filter(name, !{_SHAPED})[0]",),
    ),
    Rule(
        "heads-fit",
        _MODEL,
        "self.dim % (2 * self.numHeads) == 0",
        f"{_MODEL}.dim: got %s; expected a multiple of twice numHeads (%s)",
        ("self.dim", "2 * self.numHeads"),
        ".dim",
    ),
    Rule(
        "kv-heads-fit",
        _MODEL,
        f"self.numHeads % {_KV_HEADS} == 0",
        f"{_MODEL}.numKvHeads: got %s; expected a divisor of numHeads (%s)",
        (_KV_HEADS, "self.numHeads"),
        ".numKvHeads",
    ),
    _auto_or_positive("spec.entrypoint.recipe.config", "microBatch"),
    _auto_or_positive("spec.parallelism", "replicate"),
    _auto_or_positive("spec.parallelism", "shard"),
)

# -- the mesh: across fields of the spec -------------------------------------------------------
_P = "self.parallelism"
_WORLD = "(self.nodes.max * self.workersPerNode)"
_INNER = f"({_P}.tensor * {_P}.context * {_P}.pipeline)"
_ROOM = f"({_WORLD} / {_INNER})"
_FITS = f"{_WORLD} % {_INNER} == 0"
_SHARD_GIVEN = f"type({_P}.shard) == int && {_P}.shard >= 1"
_COPIES_GIVEN = f"type({_P}.replicate) == int && {_P}.replicate >= 1"
_GROUP = (
    f"({_INNER} * (({_SHARD_GIVEN}) ? int({_P}.shard) : "
    f"({_COPIES_GIVEN}) ? {_ROOM} / int({_P}.replicate) : 1))"
)
_MIN = "(self.nodes.min < self.nodes.max ? self.nodes.min : self.nodes.max)"
_COMMON = f"{_DIVISORS}.filter(d, self.workersPerNode % d == 0 && {_GROUP} % d == 0)"

MESH = (
    Rule(
        "mesh-fits-the-world",
        "spec",
        _FITS,
        "spec.parallelism: got %s for tensor x context x pipeline; expected a divisor of %s "
        "workers (nodes.max %s x workersPerNode %s)",
        (_INNER, _WORLD, "self.nodes.max", "self.workersPerNode"),
        ".parallelism",
    ),
    Rule(
        "shard-divides",
        "spec",
        f"!({_FITS}) || !({_SHARD_GIVEN}) || {_ROOM} % int({_P}.shard) == 0",
        "spec.parallelism.shard: got %s; expected a divisor of %s workers (nodes.max %s x "
        "workersPerNode %s, by the other axes)",
        (f"{_P}.shard", _ROOM, "self.nodes.max", "self.workersPerNode"),
        ".parallelism.shard",
    ),
    Rule(
        "replicate-follows-from-shard",
        "spec",
        f"!({_FITS}) || !({_SHARD_GIVEN}) || !({_COPIES_GIVEN}) || "
        f"{_ROOM} % int({_P}.shard) != 0 || {_ROOM} / int({_P}.shard) == int({_P}.replicate)",
        "spec.parallelism.replicate: got %s; expected %s (%s workers / shard %s); use auto or %s",
        (
            f"{_P}.replicate",
            f"{_ROOM} / int({_P}.shard)",
            _ROOM,
            f"{_P}.shard",
            f"{_ROOM} / int({_P}.shard)",
        ),
        ".parallelism.replicate",
    ),
    Rule(
        "replicate-divides",
        "spec",
        f"!({_FITS}) || ({_SHARD_GIVEN}) || !({_COPIES_GIVEN}) || "
        f"{_ROOM} % int({_P}.replicate) == 0",
        "spec.parallelism.replicate: got %s; expected a divisor of %s workers",
        (f"{_P}.replicate", _ROOM),
        ".parallelism.replicate",
    ),
    Rule(
        "groups-fill-nodes",
        "spec",
        f"!({_FITS}) || {_COMMON}.exists(d, {_MIN} * d >= {_GROUP})",
        "spec.nodes.min: got %s; expected at least %s: replica groups of %s workers, %s on each "
        "node, fill whole nodes only then; raise nodes.min or lower parallelism.shard",
        (_MIN, f"{_COMMON}.map(d, {_GROUP} / d).min()", _GROUP, "self.workersPerNode"),
        ".nodes.min",
    ),
    *(
        Rule(
            f"recipe-has-no-{axis}-axis",
            "spec",
            f"!has(self.entrypoint.recipe) || {_P}.{axis} == 1",
            f"spec.parallelism.{axis}: got %s; expected 1 with the recipe %s, which splits data "
            f"and states only; use your own script",
            (f"{_P}.{axis}", "self.entrypoint.recipe.name"),
            f".parallelism.{axis}",
        )
        for axis in ("tensor", "context", "pipeline")
    ),
)


# -- what may not change -----------------------------------------------------------------------
_STARTED = "has(self.status) && has(self.status.jobId)"
"""The operator has taken the job up. Until then, after a refusal say, it may be put right."""


def _immutable() -> Iterator[Rule]:
    for name, field in JobSpec.model_fields.items():
        yaml_name = field.alias or name
        if yaml_name in MUTABLE:
            continue
        mine, old = f"self.spec.{yaml_name}", f"oldSelf.spec.{yaml_name}"
        free = "" if yaml_name in FIXED_FROM_THE_FIRST else f"!({_STARTED}) || "
        yield Rule(
            f"immutable-{yaml_name}",
            "",
            f"{free}has({mine}) == has({old}) && (!has({mine}) || {mine} == {old})",
            f"spec.{yaml_name}: got a changed value; expected the one that the job was started "
            f"with; to change it delete the job and apply it again: checkpoints at a path of your "
            f"own stay",
            field=f".spec.{yaml_name}",
        )


RULES: tuple[Rule, ...] = (*PARTS, *MESH, *_immutable())

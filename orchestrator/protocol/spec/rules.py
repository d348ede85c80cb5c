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

from collections.abc import Iterator
from dataclasses import dataclass

from .env import CONTRACT_NAMES, RESERVED_PREFIXES
from .job import JobSpec


@dataclass(frozen=True)
class Rule:
    """One rule at one place of the schema.

    `path` is dotted, "" for the whole object; `message` is a CEL expression that yields `field: got
    X; expected Y; fix`; `update` marks a rule that compares with the old object, and exists for
    objects that have none too (optionalOldSelf).
    """

    name: str
    path: str
    rule: str
    message: str
    field: str = ""
    optional_old: bool = False


MUTABLE = (
    "nodes", "recovery", "suspend", "priority", "activeDeadlineSeconds", "ttlSecondsAfterFinished",
)  # fmt: skip
"""Fields of the spec that may change while the job lives. All others are part of every launch: a
change would reach the workers of one generation and not those of another, or would make the
checkpoints another job's."""

_DIVISORS = "[" + ", ".join(str(n) for n in range(1, 65)) + "]"
"""Of workersPerNode, which is at most 64. CEL has neither ranges nor a greatest common divisor."""


def _text(value: str) -> str:
    """A CEL string literal."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _names(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(_text(value) for value in values) + "]"


# -- one field, or fields of one part ----------------------------------------------------------
_ENTRY = (
    "((has(self.script) ? ['script'] : []) + (has(self.module) ? ['module'] : []) + "
    "(has(self.recipe) ? ['recipe'] : []))"
)
_MODEL = "spec.entrypoint.recipe.config.model"
_KV_HEADS = "(has(self.numKvHeads) ? self.numKvHeads : self.numHeads)"
_RESERVED = " || ".join(f"name.startsWith({_text(prefix)})" for prefix in RESERVED_PREFIXES)
_TAKEN = f"name in {_names(CONTRACT_NAMES)} || {_RESERVED}"
_SHAPED = "name.matches('^[A-Za-z_][A-Za-z0-9_]*$')"


def _auto_or_positive(path: str, name: str) -> Rule:
    return Rule(
        f"auto-or-number-{name}",
        path,
        f"type(self.{name}) == string ? self.{name} == 'auto' : self.{name} >= 1",
        f"'{path}.{name}: got ' + string(self.{name}) + '; expected auto or a number >= 1'",
        f".{name}",
    )


PARTS = (
    Rule(
        "name",
        "",
        "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && "
        "size(self.metadata.name) <= 52",
        "'metadata.name: got ' + self.metadata.name + '; expected at most 52 lower-case letters, "
        "digits and dashes, beginning and ending with no dash; pods are named after the job'",
    ),
    Rule(
        "one-entrypoint",
        "spec.entrypoint",
        f"size({_ENTRY}) == 1",
        f"'spec.entrypoint: got ' + (size({_ENTRY}) == 0 ? 'none of them' : "
        f"{_ENTRY}.join(' and ')) + '; expected exactly one of script, module, recipe'",
    ),
    Rule(
        "no-args-beside-a-recipe",
        "spec.entrypoint",
        "!has(self.recipe) || !has(self.args) || size(self.args) == 0",
        "'spec.entrypoint: got args beside a recipe; expected recipe.config instead'",
        ".args",
    ),
    Rule(
        "min-at-most-max",
        "spec.nodes",
        "self.min <= self.max || (oldSelf.hasValue() && oldSelf.value().min == self.min)",
        "'spec.nodes.max: got ' + string(self.max) + '; expected at least nodes.min (' + "
        "string(self.min) + ')'",
        ".max",
        optional_old=True,
    ),
    Rule(
        "one-cadence",
        "spec.checkpoint.storage",
        "!has(self.everySteps) || !has(self.everySeconds)",
        "'spec.checkpoint.storage: got everySteps and everySeconds; expected at most one of them'",
    ),
    Rule(
        "checkpoints-are-shared",
        "spec.checkpoint",
        "!has(self.path) || "
        "!(self.path.startsWith('memory://') || self.path.contains('::memory://'))",
        "'spec.checkpoint.path: got ' + self.path + '; expected a directory or the URL of a "
        "store; memory:// is the memory of a single process, and a job has many'",
        ".path",
    ),
    Rule(
        "no-password-in-a-path",
        "spec.checkpoint",
        "!has(self.path) || !self.path.matches('^[^/]*://[^/]*:[^/]*@')",
        "'spec.checkpoint.path: got a URL with a password in it; expected a URL without; put "
        "credentials into the environment or spec.env: paths are printed'",
        ".path",
    ),
    Rule(
        "beats-fit",
        "spec.recovery",
        "self.heartbeatTimeoutSeconds >= 2.0 * self.heartbeatIntervalSeconds",
        "'spec.recovery.heartbeatTimeoutSeconds: got ' + string(self.heartbeatTimeoutSeconds) + "
        "'; expected at least twice heartbeatIntervalSeconds (' + "
        "string(2.0 * self.heartbeatIntervalSeconds) + ')'",
        ".heartbeatTimeoutSeconds",
    ),
    Rule(
        "no-reserved-variable",
        "spec.env",
        f"!self.exists(name, {_TAKEN})",
        f"'spec.env.' + self.filter(name, {_TAKEN})[0] + ': got a variable that Holdfast sets for "
        f"each worker; expected any other name; remove it: ranks and addresses change with every "
        f"generation'",
    ),
    Rule(
        "variables-have-names",
        "spec.env",
        f"self.all(name, {_SHAPED})",
        f"'spec.env: got the name ' + self.filter(name, !{_SHAPED})[0] + '; expected letters, "
        f"digits and underscores'",
    ),
    Rule(
        "heads-fit",
        _MODEL,
        "self.dim % (2 * self.numHeads) == 0",
        f"'{_MODEL}.dim: got ' + string(self.dim) + '; expected a multiple of twice numHeads (' + "
        "string(2 * self.numHeads) + ')'",
        ".dim",
    ),
    Rule(
        "kv-heads-fit",
        _MODEL,
        f"self.numHeads % {_KV_HEADS} == 0",
        f"'{_MODEL}.numKvHeads: got ' + string({_KV_HEADS}) + '; expected a divisor of numHeads "
        "(' + string(self.numHeads) + ')'",
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
_NEED = f"{_COMMON}.map(d, {_GROUP} / d).min()"

MESH = (
    Rule(
        "mesh-fits-the-world",
        "spec",
        _FITS,
        f"'spec.parallelism: tensor x context x pipeline: got ' + string({_INNER}) + '; expected "
        f"a divisor of ' + string({_WORLD}) + ' workers (nodes.max ' + string(self.nodes.max) + "
        f"' x workersPerNode ' + string(self.workersPerNode) + ')'",
        ".parallelism",
    ),
    Rule(
        "shard-divides",
        "spec",
        f"!({_FITS}) || !({_SHARD_GIVEN}) || {_ROOM} % int({_P}.shard) == 0",
        f"'spec.parallelism.shard: got ' + string({_P}.shard) + '; expected a divisor of ' + "
        f"string({_ROOM}) + ' workers (nodes.max ' + string(self.nodes.max) + ' x workersPerNode "
        f"' + string(self.workersPerNode) + ', by the other axes)'",
        ".parallelism.shard",
    ),
    Rule(
        "replicate-follows-from-shard",
        "spec",
        f"!({_FITS}) || !({_SHARD_GIVEN}) || !({_COPIES_GIVEN}) || "
        f"{_ROOM} / int({_P}.shard) == int({_P}.replicate)",
        f"'spec.parallelism.replicate: got ' + string({_P}.replicate) + '; expected ' + "
        f"string({_ROOM} / int({_P}.shard)) + ' (' + string({_ROOM}) + ' workers / shard ' + "
        f"string({_P}.shard) + '); use auto or ' + string({_ROOM} / int({_P}.shard))",
        ".parallelism.replicate",
    ),
    Rule(
        "replicate-divides",
        "spec",
        f"!({_FITS}) || ({_SHARD_GIVEN}) || !({_COPIES_GIVEN}) || "
        f"{_ROOM} % int({_P}.replicate) == 0",
        f"'spec.parallelism.replicate: got ' + string({_P}.replicate) + '; expected a divisor of "
        f"' + string({_ROOM}) + ' workers'",
        ".parallelism.replicate",
    ),
    Rule(
        "groups-fill-nodes",
        "spec",
        f"!({_FITS}) || {_COMMON}.exists(d, {_MIN} * d >= {_GROUP})",
        f"'spec.nodes.min: got ' + string({_MIN}) + '; expected at least ' + string({_NEED}) + "
        f"': replica groups of ' + string({_GROUP}) + ' workers, ' + string(self.workersPerNode) + "
        f"' on each node, fill whole nodes only then; raise nodes.min or lower parallelism.shard'",
        ".nodes.min",
    ),
    *(
        Rule(
            f"recipe-has-no-{axis}-axis",
            "spec",
            f"!has(self.entrypoint.recipe) || {_P}.{axis} == 1",
            f"'spec.parallelism.{axis}: got ' + string({_P}.{axis}) + '; expected 1 with the "
            f"recipe ' + self.entrypoint.recipe.name + ', which splits data and states only; use "
            f"your own script'",
            f".parallelism.{axis}",
        )
        for axis in ("tensor", "context", "pipeline")
    ),
)


# -- what may not change -----------------------------------------------------------------------
def _immutable() -> Iterator[Rule]:
    for name, field in JobSpec.model_fields.items():
        yaml_name = field.alias or name
        if yaml_name in MUTABLE:
            continue
        mine, old = f"self.{yaml_name}", f"oldSelf.{yaml_name}"
        yield Rule(
            f"immutable-{yaml_name}",
            "spec",
            f"has({mine}) == has({old}) && (!has({mine}) || {mine} == {old})",
            f"'spec.{yaml_name}: got a changed value; expected the one that the job was created "
            f"with; to change it delete the job and apply it again: checkpoints at a path of your "
            f"own stay'",
            f".{yaml_name}",
        )


RULES: tuple[Rule, ...] = (*PARTS, *MESH, *_immutable())

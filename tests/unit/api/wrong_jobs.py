"""One wrong document per CEL rule, with parts of the message that its user gets.

Unit tests give the documents to the models, cluster tests to a real API server: both must refuse
them with the same words. A rule without a case fails a test.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from tests.documents import job_document

Document = dict[str, Any]


@dataclass(frozen=True)
class Wrong:
    """A spec that the rule refuses. `message`: parts of the text from API server and models."""

    rule: str
    spec: Document
    message: tuple[str, ...]
    name: str = "wrong"
    id: str = ""


@dataclass(frozen=True)
class Change:
    """A patch of an accepted job that the rule refuses."""

    rule: str
    patch: Document
    message: tuple[str, ...]
    before: Document = field(default_factory=dict)


SCRIPT: Document = {"entrypoint": {"script": "train.py"}}


def job(spec: Document, name: str = "right") -> Document:
    return job_document(name, copy.deepcopy(spec))


def script(**spec: Any) -> Document:
    return {**SCRIPT, **spec}


def recipe(config: Document | None = None, **spec: Any) -> Document:
    return {"entrypoint": {"recipe": {"name": "pretrain", "config": config or {}}}, **spec}


def checkpointing(**fields: Any) -> Document:
    return recipe(parallelism={"activationCheckpointing": fields})


WRONG = (
    Wrong(
        "one-guard",
        script(checkpoint={"guard": {"directories": [], "never": {}}}),
        ("guard: got directories and never; expected at most one of directories, never",),
    ),
    Wrong(
        "one-way-of-sharding",
        recipe(workersPerNode=2, parallelism={"ddp": {}, "fsdp": {}}),
        ("spec.parallelism: got ddp and fsdp; expected at most one of ddp, fsdp, pipeline",),
    ),
    Wrong(
        "one-activation-checkpointing",
        checkpointing(full={}, selective={}),
        ("Checkpointing: got full and selective; expected at most one of full, selective, budge",),
    ),
    Wrong(
        "a-node-at-least",
        {**SCRIPT, "nodes": {"min": 1, "max": 0}},
        (
            "spec.nodes.max: got 0; expected greater than or equal to 1; for no nodes set "
            "suspend: true",
        ),
    ),
    Wrong(
        "one-gpu-for-a-recipe",
        recipe(resources={"gpu": 8}),
        (
            "spec.resources.gpu: got 8 for a recipe; expected auto, 0 or 1: a recipe trains on one "
            "GPU per worker; for all 8 GPUs of a node write workersPerNode: 8 and gpu: 1",
        ),
    ),
    Wrong("name", SCRIPT, ("metadata.name: got a.b", "lower-case letters"), name="a.b"),
    Wrong(
        "one-entrypoint",
        {"entrypoint": {"script": "train.py", "module": "train"}},
        (
            "spec.entrypoint: got script and module; expected exactly one of script, module, "
            "command, recipe",
        ),
        id="two",
    ),
    Wrong("one-entrypoint", {"entrypoint": {}}, ("got none of them; expected exactly one",)),
    Wrong(
        "no-args-beside-a-recipe",
        {"entrypoint": {"recipe": {"name": "pretrain"}, "args": ["-v"]}},
        ("spec.entrypoint: got args beside a recipe; expected recipe.config instead",),
    ),
    Wrong(
        "no-resumeArgs-beside-a-recipe",
        {"entrypoint": {"recipe": {"name": "pretrain"}, "resumeArgs": ["--resume"]}},
        ("spec.entrypoint: got resumeArgs beside a recipe; expected none",),
    ),
    Wrong(
        "no-args-beside-a-command",
        {"entrypoint": {"command": "torchrun train.py", "args": ["-v"]}},
        ("spec.entrypoint: got args beside a command; expected them in the command",),
    ),
    Wrong(
        "no-python-beside-a-recipe",
        {"entrypoint": {"recipe": {"name": "pretrain"}, "python": "/opt/venv"}},
        ("spec.entrypoint: got python beside a recipe; expected it for scripts and modules only",),
    ),
    Wrong(
        "min-at-most-max",
        script(nodes={"min": 3, "max": 2}),
        ("spec.nodes.max: got 2; expected at least nodes.min (3)",),
    ),
    Wrong(
        "one-interval",
        script(checkpoint={"storage": {"everySteps": 10, "everySeconds": 5}}),
        ("spec.checkpoint.storage: got everySteps and everySeconds; expected at most one of them",),
    ),
    Wrong(
        "shared-checkpoint-path",
        script(checkpoint={"path": "memory://x"}),
        ("spec.checkpoint.path: got memory://x; expected a directory or the URL of a store",),
    ),
    *(
        Wrong(
            "complete-checkpoint-url",
            script(checkpoint={"path": path}),
            (f"spec.checkpoint.path: got {path}; expected a bucket or a directory after ://",),
            id=path,
        )
        for path in ("s3://", "file://", "gs:///")
    ),
    Wrong(
        "no-password-in-a-path",
        script(checkpoint={"path": "s3://user:secret@host/x"}),
        ("spec.checkpoint.path: got", "with a password in it; expected a URL without"),
    ),
    Wrong(
        "heartbeat-timeout",
        script(recovery={"heartbeatIntervalSeconds": 2, "heartbeatTimeoutSeconds": 3}),
        (
            "spec.recovery.heartbeatTimeoutSeconds: got 3; expected at least twice "
            "heartbeatIntervalSeconds (4)",
        ),
    ),
    Wrong(
        "no-reserved-variable",
        script(env={"WORLD_SIZE": "4"}),
        ("spec.env.WORLD_SIZE: got a variable that Holdfast sets for each worker", "remove it"),
        id="exact",
    ),
    Wrong(
        "no-reserved-variable",
        script(env={"FINE": "1", "TORCHELASTIC_RUN_ID": "x"}),
        ("spec.env.TORCHELASTIC_RUN_ID: got a variable that Holdfast sets",),
        id="prefix",
    ),
    Wrong(
        "variable-names",
        script(env={"A-B": "x"}),
        ("spec.env: got the name ", "A-B", "; expected letters, digits and underscores"),
    ),
    Wrong(
        "mesh-fits-the-world",
        script(nodes={"max": 2}, parallelism={"tensor": 4}),
        (
            "spec.parallelism: got 4 for tensor x context x pipeline; expected a divisor of 2 "
            "workers (nodes.max 2 x workersPerNode 1)",
        ),
    ),
    Wrong(
        "shard-divides",
        script(nodes={"min": 2, "max": 2}, workersPerNode=4, parallelism={"shard": 3}),
        ("spec.parallelism.shard: got 3; expected a divisor of 8 workers",),
    ),
    Wrong(
        "tensor-within-a-node",
        recipe(nodes={"min": 2, "max": 2}, workersPerNode=2, parallelism={"tensor": 4}),
        (
            "spec.parallelism.tensor: got 4; expected a divisor of workersPerNode (2): every layer "
            "waits for this axis, here for the network between nodes; ",
        ),
    ),
)


# Mistakes that only the models refuse; on Kubernetes the operator reports them.
MODELS_ONLY = (
    Wrong(
        "one-optimizer",
        recipe({"optimizer": {"muon": {}, "dion": {}}}),
        ("optimizer: got muon and dion; expected at most one of adamw, adamw8bit, muon, dion",),
    ),
    Wrong(
        "one-schedule",
        recipe({"optimizer": {"learningRateSchedule": {"wsd": {}, "linear": {}}}}),
        ("Schedule: got linear and wsd; expected at most one of cosine, linear, constant, wsd",),
    ),
    Wrong(
        "heads-fit",
        recipe({"model": {"dim": 250}}),
        (
            "spec.entrypoint.recipe.config.model.dim: got 250; expected a multiple of twice "
            "numHeads (8)",
        ),
    ),
    Wrong(
        "kv-heads-fit",
        recipe({"model": {"numKvHeads": 3}}),
        ("config.model.numKvHeads: got 3; expected a divisor of numHeads (4)",),
    ),
    Wrong(
        "decay-within-steps",
        recipe({"steps": 30, "optimizer": {"learningRateSchedule": {"wsd": {"decaySteps": 20}}}}),
        ("Schedule.wsd.decaySteps: got 20 after 20 warmupSteps; expected both within steps",),
    ),
    Wrong(
        "z-loss-of-divided-logits",
        recipe({"loss": {"zLoss": 1e-4}}, workersPerNode=2, parallelism={"tensor": 2}),
        ("config.loss.zLoss: got 0.0001 with tensor 2; expected 0, as the logits of a token are",),
    ),
    Wrong(
        "chunks-of-divided-logits",
        recipe({"loss": {"chunkTokens": 64}}, workersPerNode=2, parallelism={"tensor": 2}),
        ("config.loss.chunkTokens: got 64 with tensor 2; expected 0, as this axis passes whole",),
    ),
    Wrong(
        "bytes-in-the-vocabulary",
        recipe({"model": {"vocabSize": 128}}),
        ("config.model.vocabSize: got 128; expected at least 256 with data.format text",),
    ),
    Wrong(
        "data-format-of-stdlib",
        recipe({"data": {"format": "uint16"}}),
        ("config.data.format: got uint16 with source stdlib; expected text; name a file",),
    ),
    Wrong(
        "validation-source-or-share",
        recipe({"data": {"validation": {"source": "x", "share": 0.1}}}),
        ("config.data.validation.share: got 0.1 with its own source; expected one",),
    ),
    Wrong(
        "validation-share",
        recipe({"data": {"validation": {"share": 1}}}),
        ("config.data.validation.share: got 1; expected less than 1",),
    ),
    Wrong(
        "evaluation-with-data",
        recipe({"evaluateEverySteps": 5, "data": {"validation": {"share": 0}}}),
        ("config.evaluateEverySteps: got 5 without validation data; expected",),
    ),
    Wrong(
        "auto-or-number-microBatch",
        recipe({"microBatch": 0}),
        (
            "spec.entrypoint.recipe.config.microBatch: got 0; "
            "expected auto or greater than or equal to 1",
        ),
    ),
    Wrong(
        "auto-or-number-replicate",
        script(parallelism={"replicate": 0}),
        ("spec.parallelism.replicate: got 0; expected auto or greater than or equal to 1",),
    ),
    Wrong(
        "auto-or-number-shard",
        script(parallelism={"shard": -1}),
        ("spec.parallelism.shard: got -1; expected auto or world or greater than or equal to 1",),
    ),
    Wrong(
        "replicate-follows-from-shard",
        script(nodes={"max": 2}, workersPerNode=4, parallelism={"shard": 4, "replicate": 4}),
        ("spec.parallelism.replicate: got 4; expected 2 (8 workers / shard 4); use auto or 2",),
    ),
    Wrong(
        "world-is-one-replica",
        script(parallelism={"shard": "world", "replicate": 2}),
        ("spec.parallelism.replicate: got 2; expected 1 with shard: world",),
    ),
    Wrong(
        "world-has-no-part",
        script(parallelism={"shard": "world", "fsdp": {"reshardAfterForward": 2}}),
        (
            "spec.parallelism.fsdp.reshardAfterForward: got 2; expected true or false with shard: "
            "world",
        ),
    ),
    Wrong(
        "replicate-divides",
        script(nodes={"max": 4}, parallelism={"replicate": 3}),
        ("spec.parallelism.replicate: got 3; expected a divisor of 4 workers",),
    ),
    Wrong(
        "groups-fill-nodes",
        script(nodes={"max": 4}, parallelism={"shard": 4}),
        (
            "spec.nodes.min: got 1; expected at least 4: replica groups of 4 workers, 1 on each "
            "node, fill whole nodes only then; raise nodes.min or lower parallelism.shard",
        ),
        id="shard",
    ),
    Wrong(
        "groups-fill-nodes",
        script(nodes={"max": 12}, workersPerNode=4, parallelism={"replicate": 8}),
        (
            "spec.nodes.min: got 1; expected at least 3: replica groups of 6 workers, 4 on each "
            "node",
        ),
        id="replicate",
    ),
    Wrong(
        "layers-of-a-pipeline",
        recipe(workersPerNode=3, parallelism={"pipeline": {"ranks": 3}}),
        (
            "spec.parallelism.pipeline.ranks: got 3; expected a divisor of model.numLayers (4), "
            "which the stages divide",
        ),
    ),
)


def _fixed(name: str, value: Any, before: Document | None = None) -> Change:
    message = f"spec.{name}: got a changed value; expected the one that the job was started with"
    return Change(f"immutable-{name}", {"spec": {name: value}}, (message,), before or SCRIPT)


CHANGES = (
    _fixed("entrypoint", {"script": "other.py"}),
    _fixed("workersPerNode", 2),
    _fixed("resources", {"gpu": 1}),
    _fixed("image", "other:1"),
    _fixed("env", {"A": "2"}, script(env={"A": "1"})),
    _fixed("preload", ["json"], script()),
    _fixed("learnPreload", False, script()),
    _fixed("workingDirectory", "elsewhere"),
    _fixed("parallelism", {"offload": "cpu"}),
    _fixed("fabric", {"profile": "ib"}),
    _fixed(
        "checkpoint", {"path": "s3://bucket/other"}, script(checkpoint={"path": "s3://bucket/x"})
    ),
    _fixed("metrics", {"perRank": True}),
    _fixed("notify", [{"url": "https://example.com/x"}], script(notify=[])),
    _fixed("kubernetes", {"priorityClassName": "high"}),
    _fixed("ray", {"topologyKeys": ["example.com/rack"]}),
    _fixed("priority", 5),
    _fixed("activeDeadlineSeconds", 60),
    _fixed("queue", "team-b", script(queue="team-a")),
    _fixed("managedBy", "kueue.x-k8s.io/multikueue"),
)

# Values that the structural schema refuses in the API server's words, the models in ours.
UNTYPED_WRONG = (
    script(parallelism={"shard": 0}),
    script(parallelism={"replicate": "many"}),
    script(resources={"cpu": "two"}),
    script(resources={"memory": "4 gigs"}),
    script(resources={"cpu": -1}),
    script(recovery={"hangTimeoutSeconds": "never"}),
    script(recovery={"hangTimeoutSeconds": 0}),
    script(recovery={"hangTimeoutSeconds": [3]}),
    script(parallelism={"fsdp": {"reshardAfterForward": "perhaps"}}),
    script(parallelism={"fsdp": {"reshardAfterForward": 1.5}}),
    script(parallelism={"fsdp": {"reshardAfterForward": {}}}),
)
UNTYPED_RIGHT = (
    script(resources={"cpu": 0.5, "memory": "4Gi"}),
    script(resources={"cpu": "500m", "memory": 1024}),
    script(recovery={"hangTimeoutSeconds": 2.5}),
    script(recovery={"hangTimeoutSeconds": "auto"}),
    script(parallelism={"fsdp": {"reshardAfterForward": False}}),
    script(
        nodes={"min": 2, "max": 4},
        workersPerNode=2,
        parallelism={"shard": 4, "fsdp": {"reshardAfterForward": 2}},
    ),
)

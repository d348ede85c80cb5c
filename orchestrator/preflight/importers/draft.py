"""A TrainingJob in the making: what an importer found, and the document that it becomes.

The recipe carries all of it. With a script only the sizes of the mesh are fields of a job: the rest
is decided by the script's own code, and is reported as dropped.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import API_VERSION, KIND
from holdfast.orchestrator.planner.model import Architecture

from .keys import ConfigKeys

MAX_WORKERS = 8
"""Workers of a node that are assumed where a configuration has only their total."""
OWN_CODE = "your script decides this in its own code"


@dataclass
class Draft:
    """`shard` None is one copy on each worker (DDP), "rest" all workers that other axes leave."""

    keys: ConfigKeys
    name: str
    world: int | None = None
    nodes: int | None = None
    workers: int | None = None
    on_cpu: bool = False
    shard: int | str | None = None
    replicate: int | None = None
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    schedule: str | None = None
    reshard: bool | int = True
    whole_gradients: bool = False
    offload: bool = False
    parameters: str | None = None
    reduce: str | None = None
    float8: bool = False
    checkpointing: dict[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """Further fields of the recipe's config."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    sequence_length: int | None = None
    architecture: Architecture | None = None
    checkpoint: dict[str, Any] = field(default_factory=dict)

    @property
    def inner(self) -> int:
        return self.tensor * self.context * self.pipeline

    @property
    def ranks(self) -> int:
        """Workers that have different samples."""
        assert self.world is not None
        return self.world // self.inner

    def settle_size(self) -> None:
        """Find nodes and workers per node from what is known. Raises UserError."""
        product = self.nodes * self.workers if self.nodes and self.workers else None
        if product is not None and self.world not in (None, product):
            raise self.keys.problem(
                "number of workers",
                f"{self.world} in the configuration, {product} by nodes x workers "
                f"({self.nodes} x {self.workers})",
                "the same number",
                "correct --nodes and --workers, or the configuration",
            )
        self.world = self.world or product
        if self.world is None:
            raise self.keys.problem(
                "number of workers", None, "it", "pass --nodes and --workers: the launcher's "
                "command line has it, not this file",
            )  # fmt: skip
        assumed = self.workers is None and self.nodes is None and self.world > 1
        if self.workers is None:
            total = self.world // (self.nodes or 1)
            divisors = [n for n in range(1, MAX_WORKERS + 1) if total % n == 0]
            self.workers = total if self.nodes else max(divisors)
        self.nodes = self.nodes or self.world // self.workers
        if self.nodes * self.workers != self.world:
            raise self.keys.problem(
                "number of workers", f"{self.world}, and {self.nodes} nodes x {self.workers}",
                "whole nodes", "correct --nodes and --workers",
            )  # fmt: skip
        if assumed:
            size = f"{self.nodes} nodes x {self.workers} workers"
            why = f"the file has only the total of {self.world}; see --nodes and --workers"
            self.keys.drop("size of a node", why, f"assumed: {size}")
        if self.world % self.inner:
            raise self.keys.problem(
                "tensor x context x pipeline", self.inner, f"a divisor of {self.world} workers"
            )

    def settle_batch(self, micro: str, accumulation: str, total: str) -> None:
        """Complete total = micro-batch x accumulation x ranks from two of the three; the arguments
        are the names of these fields. Raises UserError for a contradiction."""
        ranks = self.ranks
        if self.global_batch is not None:
            each = ranks * (self.micro_batch or 1) * (self.accumulation or 1)
            exact = self.micro_batch is not None and self.accumulation is not None
            if (exact and self.global_batch != each) or self.global_batch % each:
                raise self.keys.problem(
                    total,
                    self.global_batch,
                    f"{'' if exact else 'a multiple of '}{each}: {micro} {self.micro_batch or 1} x "
                    f"{accumulation} {self.accumulation or 1} x {ranks} data-parallel workers",
                    "correct one of the three, or --nodes and --workers",
                )
            if self.micro_batch is None:
                self.micro_batch = self.global_batch // (ranks * (self.accumulation or 1))
        elif self.micro_batch is not None or self.accumulation is not None:
            self.micro_batch = self.micro_batch or 1
            self.global_batch = self.micro_batch * (self.accumulation or 1) * ranks

    # -- the document ------------------------------------------------------------------------------
    def document(self, script: str | None) -> dict[str, Any]:
        """A TrainingJob without defaults; adds to `keys.dropped` what it cannot keep."""
        spec: dict[str, Any] = {}
        axes = self._axes()
        settings = self._settings(recipe=script is None)
        if script is None:
            config = self._config()
            spec["entrypoint"] = {"recipe": {"name": "pretrain", "config": config}}
            axes |= settings
        else:
            spec["entrypoint"] = {"script": script}
            for name, value in {**settings, **self._recipe_settings()}.items():
                self.keys.drop(name, OWN_CODE, value)
        spec["nodes"] = {"min": self.nodes, "max": self.nodes}
        spec["workersPerNode"] = self.workers
        if self.on_cpu:
            spec["resources"] = {"gpu": 0}
        spec["parallelism"] = axes
        if self.checkpoint:
            spec["checkpoint"] = self.checkpoint
        metadata = {"name": job_name(self.name)}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}

    def _axes(self) -> dict[str, Any]:
        axes: dict[str, Any] = {}
        shard: int | str = 1 if self.shard is None else self.shard
        by_number = self.replicate not in (None, 1) or self.reshard not in (True, False)
        rest = self.ranks // (self.replicate or 1)
        if shard == "rest":
            shard = rest if by_number else "world"
        if self.ranks == 1:
            shard = 1
        axes["shard"] = shard
        for name in ("tensor", "context"):
            if getattr(self, name) > 1:
                axes[name] = getattr(self, name)
        if self.pipeline > 1:
            schedule = {"schedule": self.schedule} if self.schedule else {}
            axes["pipeline"] = {"ranks": self.pipeline} | schedule
        return axes

    def _settings(self, recipe: bool) -> dict[str, Any]:
        """Fields of spec.parallelism that only the recipe has."""
        settings: dict[str, Any] = {}
        sharded = self.shard is not None and (self.ranks > 1 or self.context > 1)
        can_reshard = sharded and self.pipeline == 1
        if self.reshard is not True and can_reshard:
            settings.setdefault("fsdp", {})["reshardAfterForward"] = self.reshard
        if self.whole_gradients and can_reshard:
            if self.micro_batch is not None or not recipe:
                settings.setdefault("fsdp", {})["accumulateGradients"] = "whole"
            else:
                why = "without a micro-batch nothing is accumulated, so ZeRO-1 is ZeRO-2"
                self.keys.drop("ZeRO stage", why, 1)
        if self.offload and sharded and not self.on_cpu:
            settings["offload"] = "cpu"
        elif self.offload:
            why = "one copy on each worker has no shards to offload"
            self.keys.drop("offload", why, "cpu")
        precision = {
            "parameters": self.parameters,
            "reduce": self.reduce if self.ranks > 1 and self.reduce != "float32" else None,
            "linear": "float8" if self.float8 else None,
        }
        if precision := {name: value for name, value in precision.items() if value}:
            settings["precision"] = precision
        if self.checkpointing:
            settings["activationCheckpointing"] = self.checkpointing
        return settings

    def _recipe_settings(self) -> dict[str, Any]:
        """Settings of the recipe's config, by name."""
        batch = {"microBatch": self.micro_batch, "globalBatch": self.global_batch,
                 "sequenceLength": self.sequence_length}  # fmt: skip
        named = {**batch, **self.config, **self.optimizer}
        return {name: value for name, value in named.items() if value is not None}

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = dict(self.config)
        config["globalBatch"] = self.global_batch or self.ranks * max(1, self.pipeline)
        if self.micro_batch is not None:
            config["microBatch"] = self.micro_batch
        config["model"] = self._model()
        config["data"] = {"sequenceLength": self._length()}
        if self.optimizer:
            config["optimizer"] = self.optimizer
        return config

    def _model(self) -> dict[str, Any]:
        if (architecture := self.architecture) is not None:
            return {
                "vocabSize": architecture.vocab_size,
                "dim": architecture.dim,
                "numLayers": architecture.num_layers,
                "numHeads": architecture.num_heads,
                "numKvHeads": architecture.num_kv_heads,
                "ffnDim": architecture.ffn_dim,
            }
        heads = math.lcm(4, self.tensor)
        stages = self.pipeline * (2 if self.schedule not in (None, "gpipe", "1f1b") else 1)
        why = "the file has no model: this one is small and fits the axes; put yours in its place"
        self.keys.drop("spec.entrypoint.recipe.config.model", why, "assumed")
        return {
            "vocabSize": math.lcm(256, self.tensor),
            "dim": 64 * heads,
            "numLayers": math.lcm(4, stages),
            "numHeads": heads,
            "ffnDim": 256 * heads,
        }

    def _length(self) -> int:
        parts = math.lcm(2 * self.context if self.context > 1 else 1, self.context * self.tensor)
        return self.sequence_length or math.lcm(128, parts)


def job_name(text: str) -> str:
    """A name that metadata.name allows, from a file name."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(text).stem.lower())[:52].strip("-")
    return name or "imported"

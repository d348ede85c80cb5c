"""The configurations that are measured. Sizes are such that every term of the planner matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.protocol.mesh import Mesh


@dataclass(frozen=True)
class Case:
    """One job on one mesh."""

    name: str
    family: str
    mesh: Mesh
    recipe: dict[str, Any]
    parallelism: dict[str, Any]
    on_gpu: bool
    """True with CUDA's kernels; else the CPU's."""

    @property
    def job(self) -> TrainingJob:
        world = self.mesh.world_size
        workers = min(world, 8)
        axes = {axis: getattr(self.mesh, axis) for axis in ("shard", "tensor", "context")}
        parallelism = {**axes, **self.parallelism}
        if self.mesh.pipeline > 1:
            ranks = {"ranks": self.mesh.pipeline}
            parallelism["pipeline"] = {**ranks, **parallelism.get("pipeline", {})}
        return job_from_mapping(
            {
                "apiVersion": "holdfast.dev/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "measured"},
                "spec": {
                    "entrypoint": {"recipe": {"name": "pretrain", "config": self.recipe}},
                    "nodes": {"min": world // workers, "max": world // workers},
                    "workersPerNode": workers,
                    "resources": {"gpu": int(self.on_gpu)},
                    "parallelism": parallelism,
                },
            }
        )


SMALL = {"dim": 512, "numLayers": 4, "numHeads": 8, "vocabSize": 2048}
MEDIUM = {"dim": 1024, "numLayers": 8, "numHeads": 16, "vocabSize": 32000}
GROUPED = {**MEDIUM, "numKvHeads": 4, "ffnDim": 3584}
NORMED = {**GROUPED, "qkNorm": True}
WIDE = {"dim": 2048, "numLayers": 4, "numHeads": 16, "numKvHeads": 8, "vocabSize": 8192}
DEEP = {**MEDIUM, "numLayers": 16, "vocabSize": 8192}
BF16 = {"precision": {"parameters": "bfloat16"}}
FP32 = {"precision": {"parameters": "float32"}}


def case(
    family: str,
    name: str,
    mesh: Mesh,
    model: dict[str, Any] = MEDIUM,
    *,
    length: int = 1024,
    samples: int = 2,
    passes: int = 1,
    dtype: dict[str, Any] = BF16,
    on_gpu: bool = True,
    optimizer: dict[str, Any] | None = None,
    chunk: int = 0,
    **parallelism: Any,
) -> Case:
    """`samples` of one rank in a pass, `passes` in a step."""
    recipe: dict[str, Any] = {
        "globalBatch": samples * passes * mesh.data_parallel_size,
        "model": model,
        "data": {"sequenceLength": length},
        "loss": {"chunkTokens": chunk},
        "optimizer": optimizer or {},
    }
    if passes > 1 or mesh.pipeline > 1:
        recipe["microBatch"] = samples
    return Case(name, family, mesh, recipe, {**dtype, **parallelism}, on_gpu)


def _ac(mode: str, **more: Any) -> dict[str, Any]:
    return {"activationCheckpointing": {mode: more}}


def _pipe(schedule: str) -> dict[str, Any]:
    return {"pipeline": {"schedule": schedule}}


AHEAD = {"fsdp": {"prefetchBlocks": 2}}
WHOLE = {"accumulateGradients": "whole"}


def _kept(reshard: bool | int) -> dict[str, Any]:
    return {"fsdp": {"reshardAfterForward": reshard}}


CASES: tuple[Case, ...] = (
    case("single", "one rank, float32, CPU", Mesh(), SMALL, dtype=FP32, on_gpu=False),
    case("single", "one rank, bf16", Mesh()),
    case("DDP", "DDP 4", Mesh(replicate=4)),
    case("DDP", "DDP 2, wide, short", Mesh(replicate=2), WIDE, length=512, samples=1),
    case("DDP", "DDP 4, grouped, 2 passes", Mesh(replicate=4), GROUPED, passes=2),
    case("DDP", "DDP 4, float32", Mesh(replicate=4), dtype=FP32),
    case("DDP", "DDP 4, AC full", Mesh(replicate=4), **_ac("full")),
    case(
        "DDP", "DDP 4, gradients beside buckets", Mesh(replicate=4), SMALL, length=256,
        ddp={"gradientAsBucketView": False},
    ),
    case(
        "DDP", "DDP 4, bf16 reduce", Mesh(replicate=4), SMALL, length=128,
        dtype={"precision": {"parameters": "bfloat16", "reduce": "bfloat16"}},
    ),
    case("FSDP", "FSDP 2", Mesh(shard=2)),
    case("FSDP", "FSDP 8", Mesh(shard=8)),
    case("FSDP", "FSDP 64", Mesh(shard=64)),
    case("FSDP", "FSDP 8, grouped", Mesh(shard=8), GROUPED),
    case("FSDP", "FSDP 8, qk norm", Mesh(shard=8), NORMED, length=2048, samples=1),
    case("FSDP", "FSDP 8, wide", Mesh(shard=8), WIDE, length=512, samples=4),
    case("FSDP", "FSDP 8, wide, short: states count", Mesh(shard=8), WIDE, length=64, samples=1),
    case("FSDP", "FSDP 8, small vocabulary", Mesh(shard=8), {**DEEP, "vocabSize": 2048}),
    case("FSDP", "FSDP 8, float32, CPU", Mesh(shard=8), SMALL, dtype=FP32, on_gpu=False),
    case("FSDP", "FSDP 8, bf16, CPU", Mesh(shard=8), GROUPED, on_gpu=False),
    case("FSDP", "FSDP 8, float32, GPU", Mesh(shard=8), dtype=FP32),
    case("FSDP", "FSDP 8, 4 passes", Mesh(shard=8), passes=4),
    case(
        "FSDP", "FSDP 8, bf16 reduce", Mesh(shard=8),
        dtype={"precision": {"parameters": "bfloat16", "reduce": "bfloat16"}},
    ),
    case("FSDP", "FSDP 8, prefetch 2", Mesh(shard=8), WIDE, length=256, **AHEAD),
    case("ZeRO", "ZeRO-2 8", Mesh(shard=8), WIDE, length=512, **_kept(False)),
    case("ZeRO", "ZeRO-2 8, 4 passes", Mesh(shard=8), passes=4, **_kept(False)),
    case(
        "ZeRO", "ZeRO-1 8, 4 passes", Mesh(shard=8), WIDE, length=512, passes=4,
        fsdp={"reshardAfterForward": False, **WHOLE},
    ),
    case("ZeRO", "whole gradients, 2 passes", Mesh(shard=8), passes=2, fsdp=WHOLE),
    case("ZeRO", "reshard 2 of 8", Mesh(shard=8), WIDE, length=512, **_kept(2)),
    case("ZeRO", "reshard 4 of 16", Mesh(shard=16), **_kept(4)),
    case("HSDP", "HSDP 2 x 4", Mesh(replicate=2, shard=4)),
    case("HSDP", "HSDP 8 x 8, grouped", Mesh(replicate=8, shard=8), GROUPED),
    case("HSDP", "HSDP 2 x 4, 2 passes", Mesh(replicate=2, shard=4), passes=2),
    case("HSDP", "HSDP 2 x 8, wide, short", Mesh(replicate=2, shard=8), WIDE, length=64),
    case("TP", "TP 2", Mesh(tensor=2)),
    case("TP", "TP 4", Mesh(tensor=4), WIDE, length=512),
    case("TP", "TP 8, FSDP 2", Mesh(shard=2, tensor=8), {**WIDE, "qkNorm": True}),
    case("TP", "TP 4, FSDP 4, grouped", Mesh(shard=4, tensor=4), GROUPED),
    case("TP", "TP 2, HSDP 2 x 2", Mesh(replicate=2, shard=2, tensor=2), GROUPED),
    case("TP", "TP 2, FSDP 4, AC full", Mesh(shard=4, tensor=2), **_ac("full")),
    case("CP", "CP 2", Mesh(context=2), length=2048),
    case("CP", "CP 4", Mesh(context=4), GROUPED, length=4096, samples=1),
    case("CP", "CP 2, FSDP 4", Mesh(shard=4, context=2), GROUPED, length=2048),
    case("CP", "CP 4, FSDP 2, AC full", Mesh(shard=2, context=4), length=4096, **_ac("full")),
    case("PP", "PP 2, 1f1b, 4 passes", Mesh(pipeline=2), DEEP, samples=1, passes=4),
    case("PP", "PP 2, gpipe, 4 passes", Mesh(pipeline=2), DEEP, passes=4, **_pipe("gpipe")),
    case("PP", "PP 4, 1f1b, 8 passes", Mesh(pipeline=4), DEEP, samples=1, passes=8),
    case(
        "PP", "PP 4, interleaved, 8 passes", Mesh(pipeline=4), DEEP, samples=1, passes=8,
        **_pipe("interleaved1f1b"),
    ),
    case(
        "PP", "PP 2, interleaved zero bubble", Mesh(pipeline=2), DEEP, samples=1, passes=4,
        **_pipe("interleavedZeroBubble"),
    ),
    case(
        "PP", "PP 4, V zero bubble", Mesh(pipeline=4), DEEP, samples=1, passes=8,
        **_pipe("zbvZeroBubble"),
    ),
    case("PP", "PP 2, AC full", Mesh(pipeline=2), DEEP, passes=4, **_ac("full")),
    case("3-D", "PP 2, FSDP 4", Mesh(pipeline=2, shard=4), DEEP, passes=4),
    case("3-D", "PP 2, FSDP 2, TP 2", Mesh(pipeline=2, shard=2, tensor=2), DEEP, passes=2),
    case("3-D", "PP 2, FSDP 2, CP 2", Mesh(pipeline=2, shard=2, context=2), DEEP, passes=4),
    case("3-D", "FSDP 2, CP 2, TP 2", Mesh(shard=2, context=2, tensor=2), length=2048),
    case(
        "3-D", "PP 2, HSDP 2 x 2, TP 2, AC full",
        Mesh(pipeline=2, replicate=2, shard=2, tensor=2), DEEP, passes=4, **_ac("full"),
    ),
    case("AC", "AC full", Mesh(shard=8), DEEP, **_ac("full")),
    case("AC", "AC every 2nd", Mesh(shard=8), DEEP, **_ac("full", everyNthBlock=2)),
    case("AC", "AC selective", Mesh(shard=8), DEEP, **_ac("selective")),
    case("AC", "AC selective attention", Mesh(shard=8), GROUPED,
          **_ac("selective", keep=["attention"])),
    case("AC", "AC full, CPU", Mesh(shard=8), DEEP, on_gpu=False, dtype=FP32, **_ac("full")),
    case("loss", "chunked loss 512", Mesh(shard=8), chunk=512),
    case("loss", "chunked loss 256, AC full", Mesh(shard=8), GROUPED, chunk=256, **_ac("full")),
    case("optimizer", "adamw8bit", Mesh(shard=8), WIDE, length=128, optimizer={"adamw8bit": {}}),
    case("optimizer", "muon", Mesh(shard=8), WIDE, length=128, optimizer={"muon": {}}),
    case("optimizer", "muon, one rank", Mesh(), WIDE, length=128, optimizer={"muon": {}}),
    case("optimizer", "dion", Mesh(shard=8), WIDE, length=128, optimizer={"dion": {}}),
    case(
        "optimizer", "in backward", Mesh(shard=8), WIDE, length=128,
        optimizer={"adamw": {"inBackward": True}, "gradientClip": 0},
    ),
    case("offload", "offload, FSDP 8", Mesh(shard=8), offload="cpu"),
    case("offload", "offload, FSDP 8, 2 passes", Mesh(shard=8), passes=2, offload="cpu"),
    case(
        "offload", "offload, HSDP 2 x 4, AC full", Mesh(replicate=2, shard=4), WIDE, length=256,
        offload="cpu", **_ac("full"),
    ),
)  # fmt: skip

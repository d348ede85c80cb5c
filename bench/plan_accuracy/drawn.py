"""Jobs drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol.mesh import Mesh

from .cases import BF16, FP32, Case, case


def drawn(seed: int, number: int, family: str) -> Iterator[Case]:
    """`number` jobs that the spec allows."""
    draw, found = random.Random(seed), 0
    while found < number:
        one = _draw(draw, family, f"seed {seed}, number {found + 1}")
        try:
            one.job  # noqa: B018 (raises for what the spec refuses)
        except HoldfastError:
            continue
        found += 1
        yield one


def _draw(draw: random.Random, family: str, name: str) -> Case:
    mesh = Mesh(
        replicate=draw.choice((1, 1, 2, 4)),
        shard=draw.choice((1, 2, 4, 8, 16)),
        tensor=draw.choice((1, 1, 1, 2, 4)),
        context=draw.choice((1, 1, 1, 2)),
        pipeline=draw.choice((1, 1, 1, 2)),
    )
    heads = draw.choice((8, 16))
    model = {
        "dim": heads * draw.choice((32, 64, 128)),
        "numLayers": draw.choice((2, 4, 6)),
        "numHeads": heads,
        "numKvHeads": heads // draw.choice((1, 1, 2, 4)),
        "vocabSize": draw.choice((512, 4096, 16384, 50304)),
        "qkNorm": draw.random() < 0.2,
    }
    if draw.random() < 0.5:
        model["ffnDim"] = model["dim"] * draw.choice((2, 3, 4))
    options: dict[str, Any] = {}
    mode = draw.choice(("none", "none", "full", "selective"))
    if mode != "none":
        every = draw.choice((1, 1, 2))
        options["activationCheckpointing"] = {mode: {"everyNthBlock": every}}
    if draw.random() < 0.3 and mesh.pipeline == 1:
        options["fsdp"] = {"reshardAfterForward": draw.choice((False, False, 2))}
    if draw.random() < 0.2 and mesh.shard > 1:
        options["offload"] = "cpu"
    if mesh.pipeline > 1:
        options["pipeline"] = {"schedule": draw.choice(("gpipe", "1f1b"))}
    on_gpu = draw.random() < 0.8
    return case(
        family,
        name,
        mesh,
        model,
        length=draw.choice((128, 512, 1024, 2048)),
        samples=draw.choice((1, 2, 4)),
        passes=draw.choice((1, 1, 2, 4)),
        dtype=BF16 if on_gpu or draw.random() < 0.3 else FP32,
        on_gpu=on_gpu,
        chunk=draw.choice((0, 0, 0, 128)),
        **options,
    )

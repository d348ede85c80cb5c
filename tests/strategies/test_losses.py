"""Every strategy computes what one process computes: losses and gradient norms."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Shows
from .rig import DDP, HSDP, Numbers, alone, compare, document, several

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 20
MESHES: dict[str, dict[str, Any]] = {
    DDP: {"shard": 1},
    HSDP: {"shard": 2},
    "TP 2 x FSDP 2, blocks recomputed": {
        "tensor": 2, "shard": 2, "activationCheckpointing": {"full": {}}
    },
    "TP 2 x FSDP 2": {"tensor": 2, "shard": 2},
    "TP 2 x DDP 2": {"tensor": 2, "replicate": 2},
    "CP 4": {"context": 4, "shard": 1},
    "CP 2 x FSDP 2": {"context": 2, "shard": 2},
    "CP 2 x DDP 2, blocks recomputed except matmuls and attention": {
        "context": 2, "replicate": 2, "activationCheckpointing": {"selective": {}}
    },
    "CP 2 x TP 2, blocks recomputed": {
        "context": 2, "tensor": 2, "activationCheckpointing": {"full": {}}
    },
    "PP 4, 1F1B": {"pipeline": {"ranks": 4}},
    "PP 4, GPipe, blocks recomputed": {
        "pipeline": {"ranks": 4, "schedule": "gpipe"}, "activationCheckpointing": {"full": {}}
    },
    "PP 2 x FSDP 2": {"pipeline": {"ranks": 2}, "shard": 2},
    "PP 2 x DDP 2": {"pipeline": {"ranks": 2}, "replicate": 2},
    "PP 2 x DDP 2, interleaved": {
        "pipeline": {"ranks": 2, "schedule": "interleaved1f1b"}, "replicate": 2
    },
    "PP 2 x DDP 2, zero bubble in a V": {
        "pipeline": {"ranks": 2, "schedule": "zbvZeroBubble"}, "replicate": 2
    },
    "PP 2 x TP 2": {"pipeline": {"ranks": 2}, "tensor": 2},
    "PP 2 x CP 2": {"pipeline": {"ranks": 2}, "context": 2},
    "PP 2 x CP 2, zero bubble in a V": {
        "pipeline": {"ranks": 2, "schedule": "zbvZeroBubble"}, "context": 2
    },
    "PP 2 x TP 2, interleaved zero bubble": {
        "pipeline": {"ranks": 2, "schedule": "interleavedZeroBubble"}, "tensor": 2
    },
    "PP 2 x FSDP 2, zero bubble in a V": {
        "pipeline": {"ranks": 2, "schedule": "zbvZeroBubble"}, "shard": 2
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    job = document("one", STEPS, {"shard": 1}, workers=1)
    return alone(tmp_path_factory.mktemp("one"), job, 1)


@pytest.fixture(scope="module")
def many(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Numbers]:
    """Numbers that this run compares: the others are long tests."""
    items = (item for item in request.session.items if item.path == request.path)
    wanted = [item.callspec.params["mesh"] for item in items if isinstance(item, pytest.Function)]
    jobs = []
    for number, mesh in enumerate(MESHES[name] for name in wanted):
        config = {}
        if "pipeline" in mesh:
            config["microBatch"] = 4 if "tensor" in mesh else 1
        jobs.append(document(f"m{number}", STEPS, mesh, config=config))
    found = several(tmp_path_factory.mktemp("many"), jobs, 4)
    return dict(zip(wanted, found.values(), strict=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_gradient_norms_are_those_of_one_process(
    mesh: str, one_process: Numbers, many: dict[str, Numbers], shows: Shows
) -> None:
    assert len(one_process) == STEPS
    compare(mesh, many[mesh], one_process)
    shows(mesh, "equal", f"{STEPS} losses and norms, 4 ranks")

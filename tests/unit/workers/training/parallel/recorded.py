"""One rank of a mesh whose collectives return at once, and a record of what it sends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.load import job_from_mapping
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.agent.pool.warmup import _fake_groups
from holdfast.workers.session.core import Session
from holdfast.workers.session.distributed import Meshes, RankEnv
from holdfast.workers.training.recipes import pretrain
from tests.documents import job_document

_COLLECTIVES = ("c10d", "_c10d_functional")
"""torch's libraries: of calls that write their result, and of those that return it."""


@dataclass(frozen=True)
class Sent:
    """One collective: its name in torch's c10d library, the type and number of the elements."""

    operation: str
    dtype: torch.dtype
    num_elements: int


class Recorder(TorchDispatchMode):
    """Notes each collective, and what `note` is called with, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    @property
    def sent(self) -> list[Sent]:
        return [one for one in self.log if isinstance(one, Sent)]

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation.namespace in _COLLECTIVES and "wait_tensor" not in operation.name():
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)]
            largest = max(tensors, key=torch.Tensor.numel)
            name = operation.name().partition("::")[2]
            self.log.append(Sent(name, largest.dtype, largest.numel()))
        return operation(*args, **(kwargs or {}))


def job_of(
    parallelism: dict[str, Any], config: dict[str, Any] | None = None, workers: int = 2
) -> TrainingJob:
    model = {"dim": 32, "numLayers": 3, "numHeads": 2}
    settings = {"globalBatch": 8, "model": model, "data": {"sequenceLength": 16}, **(config or {})}
    return job_from_mapping(
        job_document(
            "one",
            {
                "entrypoint": {"recipe": {"name": "pretrain", "config": settings}},
                "workersPerNode": workers,
                "parallelism": parallelism,
            },
        )
    )


@contextlib.contextmanager
def rank_of(job: TrainingJob, mesh: Mesh) -> Iterator[pretrain.Trainer]:
    """Rank 0 of this mesh, ready to step. Its values mean nothing."""
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    with _fake_groups(mesh.world_size):
        session = Session(RankEnv(world_size=mesh.world_size), torch.device("cpu"), mesh)
        session.meshes = Meshes(mesh, "cpu", prefix="fake_")
        trainer = pretrain.build(job, recipe.config, session)
        trainer.parallel.refuse_non_finite = False
        yield trainer

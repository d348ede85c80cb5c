"""`holdfast.ray.Trainer`, here RayTrainer: what TorchTrainer of Ray Train does, as a job of
Holdfast on a Ray cluster.

The names and the order of parameters are those of Ray Train. What Holdfast does not do is refused
by the name of the parameter. workers/integrations/ray_train.py is the side of the workers.
"""

from __future__ import annotations

import inspect
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api.v1alpha1 import job_from_mapping
from ..errors import HoldfastError, Problem, UserError
from ..protocol import run_directory
from ..protocol.run_directory import TrainCheckpoint
from ..runtime.observe.view import JobView
from .client import Client
from .function_script import write_script


@dataclass(kw_only=True)
class ScalingConfig:
    """How many workers, and what each needs. Raises UserError for what is not supported."""

    num_workers: int | tuple[int, int] = 1
    """A number, or the least and the most: then the job goes on with fewer while nodes are lost."""
    use_gpu: bool = False
    """One GPU for each worker."""
    resources_per_worker: Mapping[str, float] | None = None
    """CPU, GPU (a whole number) and memory in bytes."""
    placement_strategy: str = "PACK"
    trainer_resources: Any = None
    label_selector: Any = None
    accelerator_type: Any = None
    use_tpu: bool = False
    topology: Any = None

    def __post_init__(self) -> None:
        _expect_unset(self, "trainer_resources", "label_selector", "accelerator_type", "topology")
        if self.use_tpu or self.placement_strategy != "PACK":
            field = "use_tpu" if self.use_tpu else "placement_strategy"
            raise _unsupported(field, getattr(self, field), "False" if self.use_tpu else "PACK")
        for name, amount in (self.resources_per_worker or {}).items():
            if name not in ("CPU", "GPU", "memory"):
                raise _unsupported("resources_per_worker", name, "CPU, GPU or memory")
            if name == "GPU" and amount != int(amount):
                raise _unsupported("resources_per_worker['GPU']", amount, "a whole number")
        least, most = self.bounds
        if not 1 <= least <= most:
            expected = "a number of at least 1, or (least, most)"
            raise _unsupported("num_workers", self.num_workers, expected)

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most workers."""
        if isinstance(self.num_workers, tuple):
            return self.num_workers
        return self.num_workers, self.num_workers

    @property
    def gpus(self) -> int:
        """Of a worker."""
        return int((self.resources_per_worker or {}).get("GPU", 1 if self.use_gpu else 0))

    @property
    def cpus(self) -> float:
        """Of a worker. Ray Train's default is 1, also with a GPU."""
        return (self.resources_per_worker or {}).get("CPU", 1)


@dataclass
class FailureConfig:
    """After how many failures a run fails."""

    max_failures: int | None = None
    """Failures within an hour of each class: errors of the function, and lost workers or nodes.
    None: what a spec has by default (spec.recovery.budgets); -1 is not supported."""

    def __post_init__(self) -> None:
        if self.max_failures is not None and self.max_failures < 0:
            raise _unsupported("max_failures", self.max_failures, "0 or more, or None")


@dataclass
class CheckpointConfig:
    """Which checkpoints are kept."""

    num_to_keep: int | None = None
    """The newest ones; None: all."""
    checkpoint_score_attribute: Any = None
    checkpoint_score_order: str = "max"

    def __post_init__(self) -> None:
        _expect_unset(self, "checkpoint_score_attribute")
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise _unsupported("num_to_keep", self.num_to_keep, "at least 1, or None")


@dataclass
class RunConfig:
    """The name of a run, and where its checkpoints are kept."""

    name: str | None = None
    """A run with the name of an earlier one goes on from its newest checkpoint. None: a new one."""
    storage_path: str | None = None
    """A directory that all nodes and this process see; ~/ray_results by default."""
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: Any = None
    worker_runtime_env: Any = None
    logging_config: Any = None

    def __post_init__(self) -> None:
        _expect_unset(
            self, "storage_filesystem", "callbacks", "worker_runtime_env", "logging_config"
        )
        if self.storage_path is not None and "://" in self.storage_path:
            expected = "a directory that all nodes see"
            raise _unsupported("storage_path", self.storage_path, expected)


class TrainingFailedError(HoldfastError):
    """The job of `fit` did not succeed."""


@dataclass(frozen=True)
class Result:
    """What `fit` returns."""

    metrics: dict[str, Any] | None
    """The newest that rank 0 has reported."""
    checkpoint: TrainCheckpoint | None
    """The newest complete one."""
    path: str
    """The directory of the run."""
    view: JobView
    """The report of the job: incidents, goodput."""
    error: TrainingFailedError | None = None


class RayTrainer:
    """Trains a function on a Ray cluster, as TorchTrainer does:

        from holdfast.ray import RunConfig, ScalingConfig, Trainer

        trainer = Trainer(train_func, train_loop_config={"lr": 1e-3},
                          scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
                          run_config=RunConfig(name="mine", storage_path="/shared"))
        result = trainer.fit()

    The function gets `train_loop_config` if it takes an argument. Its source becomes a script, see
    docs/user/python-client.md. Raises UserError for parameters that are not supported.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., object],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: Any = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Any = None,
        dataset_config: Any = None,
        validation_config: Any = None,
        metadata: Any = None,
        resume_from_checkpoint: Any = None,
    ) -> None:
        given = {
            "torch_config": torch_config,
            "datasets": datasets,
            "dataset_config": dataset_config,
            "validation_config": validation_config,
            "metadata": metadata,
            "resume_from_checkpoint": resume_from_checkpoint,
        }
        for name, value in given.items():
            if value is not None:
                raise _unsupported(name, value, "nothing")
        self._function = train_loop_per_worker
        self._config = dict(train_loop_config or {})
        self._scaling = scaling_config or ScalingConfig()
        self._run = run_config or RunConfig()

    def fit(self) -> Result:
        """Run the function on the cluster that this process is connected to, or on $RAY_ADDRESS or
        the cluster of this machine, until it has ended. Ctrl-C cancels the job. Raises UserError
        for what is refused, and TrainingFailedError with the reason of a job that fails."""
        from ..backends.ray import cluster
        from ..cli.options import ray_address

        cluster.connect(ray_address(""))
        client = Client(ray=cluster.head_address() or ray_address(""))
        title = self._run.name or self._function.__name__
        words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-") or "train"
        job_name = f"{words}-{secrets.token_hex(2)}"
        name = self._run.name or job_name
        path = Path(self._run.storage_path or "~/ray_results").expanduser().absolute() / name
        with tempfile.TemporaryDirectory(prefix="holdfast-") as made:
            script = self._script(Path(made), path, name)
            job = client.submit_made(script, self._document(job_name, script.name, _capacities()))
        try:
            view = job.wait()
        except KeyboardInterrupt:
            job.cancel()
            raise
        if view.state != "succeeded":
            text = f"job {job_name}: {view.state}: {view.reason}"
            raise TrainingFailedError("\n".join(filter(None, [text, view.traceback.rstrip()])))
        found = run_directory.metrics(path), run_directory.newest(path)
        return Result(*found, str(path), view)

    def _script(self, directory: Path, path: Path, name: str) -> Path:
        takes = any(
            one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
            for one in inspect.signature(self._function).parameters.values()
        )
        keep = (self._run.checkpoint_config or CheckpointConfig()).num_to_keep
        before = [
            "from holdfast.workers.integrations import ray_train",
            f"ray_train.begin({str(path)!r}, {name!r}, {keep!r})",
        ]
        args = (self._config,) if takes else ()
        return write_script(directory, self._function, args, {}, before)

    def _document(
        self, name: str, script: str, capacities: list[Mapping[str, float]]
    ) -> dict[str, Any]:
        """The spec."""
        scaling = self._scaling
        least, most = scaling.bounds
        per_node = workers_per_node(scaling, capacities)
        resources: dict[str, Any] = {"cpu": scaling.cpus, "gpu": scaling.gpus}
        if "memory" in (scaling.resources_per_worker or {}):
            resources["memory"] = int((scaling.resources_per_worker or {})["memory"])
        spec: dict[str, Any] = {
            "entrypoint": {"script": script},
            "nodes": {"min": -(-least // per_node), "max": most // per_node},
            "workersPerNode": per_node,
            "resources": resources,
        }
        failures = (self._run.failure_config or FailureConfig()).max_failures
        if failures is not None:
            budget = {"restarts": failures}
            spec["recovery"] = {"budgets": {"user": budget, "infrastructure": budget}}
        document = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": spec,
        }
        job_from_mapping(document, "the Trainer")
        return document


def workers_per_node(scaling: ScalingConfig, capacities: list[Mapping[str, float]]) -> int:
    """The most workers for a node of the job with which the cluster, whose Ray nodes have these
    resources, can hold all workers; 1 where it cannot hold them now. Ray Train packs workers
    likewise."""
    _least, most = scaling.bounds
    needs = {"CPU": scaling.cpus, "GPU": scaling.gpus, **(scaling.resources_per_worker or {})}
    room = [
        min(int(node.get(name, 0) // need) for name, need in needs.items() if need)
        for node in capacities
    ]
    for size in range(most, 1, -1):
        if most % size == 0 and sum(free // size for free in room) * size >= most:
            return size
    return 1


def _capacities() -> list[Mapping[str, float]]:
    """The resources of each living Ray node."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _expect_unset(config: object, *fields: str) -> None:
    for field in fields:
        if getattr(config, field) is not None:
            raise _unsupported(field, getattr(config, field), "nothing")


def _unsupported(field: str, got: object, expected: str) -> UserError:
    fix = "see docs/user/python-client.md for what a Trainer takes"
    return UserError(str(Problem(field, repr(got)[:80], expected, fix)))

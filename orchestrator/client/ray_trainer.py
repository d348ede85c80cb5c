"""`holdfast.ray.Trainer`, here RayTrainer: what TorchTrainer of Ray Train does, as a job of
Holdfast on a Ray cluster.

The names and the order of parameters are those of Ray Train. What Holdfast does not do is refused
by the name of the parameter. workers/integrations/ray_train.py is the side of the workers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cli.script_job import job_document
from ..errors import HoldfastError, UserError
from ..protocol import run_directory
from ..protocol.run_directory import TrainCheckpoint
from ..runtime.observe.view import JobView
from .client import Client
from .function_script import function_title, write_script


@dataclass(kw_only=True)
class ScalingConfig:
    """Number of workers, and what each needs. Raises UserError for what is not supported."""

    num_workers: int | tuple[int, int] = 1
    """A number, or (least, most): the job then continues with fewer while nodes are lost."""
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
    elastic_resize_monitor_interval_s: Any = None

    def __post_init__(self) -> None:
        _expect_unset(self, "trainer_resources", "label_selector", "accelerator_type", "topology")
        _expect_unset(self, "elastic_resize_monitor_interval_s")
        if self.use_tpu or self.placement_strategy != "PACK":
            field = "use_tpu" if self.use_tpu else "placement_strategy"
            raise _unsupported(field, getattr(self, field), "False" if self.use_tpu else "PACK")
        for name, amount in (self.resources_per_worker or {}).items():
            if name not in ("CPU", "GPU", "memory"):
                raise _unsupported("resources_per_worker", name, "CPU, GPU or memory")
            if not isinstance(amount, (int, float)) or amount < 0:
                raise _unsupported(f"resources_per_worker[{name!r}]", amount, "a number, 0 or more")
            if name == "GPU" and amount != int(amount):
                raise _unsupported("resources_per_worker['GPU']", amount, "a whole number")
        if self.use_gpu and self.gpus == 0:
            expected = "1 or more with use_gpu=True"
            raise _unsupported("resources_per_worker['GPU']", 0, expected)
        bounds = self.bounds
        is_whole = len(bounds) == 2 and all(type(bound) is int for bound in bounds)
        if not is_whole or not 1 <= bounds[0] <= bounds[1]:
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
        """GPUs of a worker."""
        return int((self.resources_per_worker or {}).get("GPU", 1 if self.use_gpu else 0))

    @property
    def cpus(self) -> float:
        """CPUs of a worker. Ray Train's default is 1, also with a GPU."""
        return (self.resources_per_worker or {}).get("CPU", 1)


@dataclass
class FailureConfig:
    """Number of failures after which a run fails."""

    max_failures: int | None = None
    """Failures within an hour of each class: errors of the function, and lost workers or nodes.
    None: what a spec has by default (spec.recovery.budgets); -1 is not supported."""
    fail_fast: Any = None
    controller_failure_limit: Any = None
    max_preemption_failures: Any = None
    relax_collectives_on_preemption: Any = None
    preemption_grace_s: Any = None

    def __post_init__(self) -> None:
        _expect_unset(self, "fail_fast", "controller_failure_limit", "max_preemption_failures")
        _expect_unset(self, "relax_collectives_on_preemption", "preemption_grace_s")
        if self.max_failures is not None and self.max_failures < 0:
            raise _unsupported("max_failures", self.max_failures, "0 or more, or None")


@dataclass
class CheckpointConfig:
    """Rules that keep checkpoints."""

    num_to_keep: int | None = None
    """The newest ones; None: all."""
    checkpoint_score_attribute: Any = None
    checkpoint_score_order: str = "max"
    checkpoint_frequency: Any = None
    checkpoint_at_end: Any = None

    def __post_init__(self) -> None:
        _expect_unset(
            self, "checkpoint_score_attribute", "checkpoint_frequency", "checkpoint_at_end"
        )
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise _unsupported("num_to_keep", self.num_to_keep, "at least 1, or None")


@dataclass
class RunConfig:
    """The name of a run, and where its checkpoints are kept."""

    name: str | None = None
    """A run with the name of an earlier one resumes from its newest checkpoint. None: a new one."""
    storage_path: str | os.PathLike[str] | None = None
    """A directory that all nodes and this process see; ~/ray_results by default."""
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: Any = None
    worker_runtime_env: Any = None
    logging_config: Any = None
    sync_config: Any = None
    verbose: Any = None
    stop: Any = None
    progress_reporter: Any = None
    log_to_file: Any = None

    def __post_init__(self) -> None:
        _expect_unset(
            self, "storage_filesystem", "callbacks", "worker_runtime_env", "logging_config",
            "sync_config", "verbose", "stop", "progress_reporter", "log_to_file",
        )  # fmt: skip
        _expect_type("failure_config", self.failure_config, FailureConfig)
        _expect_type("checkpoint_config", self.checkpoint_config, CheckpointConfig)
        if self.storage_path is not None and "://" in os.fspath(self.storage_path):
            expected = "a directory that all nodes see"
            raise _unsupported("storage_path", self.storage_path, expected)


@dataclass
class TorchConfig:
    """The process group that the function finds."""

    backend: str | None = None
    """nccl, gloo or both, as in cpu:gloo,cuda:nccl. None: nccl with GPUs, gloo without."""
    init_method: str = "env"
    timeout_s: float = 1800
    """Limit of a collective."""

    def __post_init__(self) -> None:
        if self.backend not in (None, "nccl", "gloo", "cpu:gloo,cuda:nccl"):
            expected = "nccl, gloo, cpu:gloo,cuda:nccl or None"
            raise _unsupported("backend", self.backend, expected)
        if self.init_method != "env":
            raise _unsupported("init_method", self.init_method, "env")
        if self.timeout_s <= 0:
            raise _unsupported("timeout_s", self.timeout_s, "more than 0")


class TrainingFailedError(HoldfastError):
    """The job of `fit` did not succeed."""


@dataclass(frozen=True)
class Result:
    """Result of `fit`."""

    metrics: dict[str, Any] | None
    """The newest that rank 0 has reported."""
    checkpoint: TrainCheckpoint | None
    """The newest complete one."""
    path: str
    """The directory of the run."""
    view: JobView
    """The report of the job: incidents, goodput."""
    best_checkpoints: list[tuple[TrainCheckpoint, dict[str, Any]]]
    """Kept checkpoints, oldest first, each with the metrics of its report."""
    _returned: Mapping[str, str]
    error: TrainingFailedError | None = None

    @property
    def return_value(self) -> Any:
        """Result of rank 0's function. Raises UserError for a value that is not plain."""
        if "refused" in self._returned:
            expected = "numbers, texts, None, and lists, tuples, dicts and sets of them"
            fix = "report other objects in a checkpoint"
            raise UserError.of("return_value", self._returned["refused"], expected, fix)
        return ast.literal_eval(self._returned["value"])

    @property
    def metrics_dataframe(self) -> Any:
        """The metrics of best_checkpoints, a row each; None: there are no checkpoints. Raises
        UserError where pandas is not installed."""
        if not self.best_checkpoints:
            return None
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError:
            fix = "install it, or use best_checkpoints, which has the same metrics"
            raise UserError.of(
                "metrics_dataframe", "no pandas", "pandas in this environment", fix
            ) from None
        return pandas.DataFrame([metrics for _checkpoint, metrics in self.best_checkpoints])

    def get_best_checkpoint(self, metric: str, mode: str) -> TrainCheckpoint | None:
        """The kept checkpoint with the largest (mode max) or the smallest (min) metric."""
        if mode not in ("max", "min"):
            raise _unsupported("mode", mode, "max or min")
        rated = [(c, metrics) for c, metrics in self.best_checkpoints if metric in metrics]
        if not rated:
            names = sorted({name for _one, metrics in self.best_checkpoints for name in metrics})
            raise _unsupported("metric", metric, f"one of {', '.join(names) or 'none'}")
        choose = max if mode == "max" else min
        return choose(rated, key=lambda one: one[1][metric])[0]


class RayTrainer:
    """Trains a function on a Ray cluster, as TorchTrainer does:

        from holdfast.ray import RunConfig, ScalingConfig, Trainer

        trainer = Trainer(train_func, train_loop_config={"lr": 1e-3},
                          scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
                          run_config=RunConfig(name="mine", storage_path="/shared"))
        result = trainer.fit()

    The function gets `train_loop_config` if it takes an argument. It is pickled, see
    docs/user/python-client.md. Raises UserError for parameters that are not supported.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., object],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Any = None,
        dataset_config: Any = None,
        validation_config: Any = None,
        metadata: Any = None,
        resume_from_checkpoint: Any = None,
    ) -> None:
        options = {
            "datasets": datasets,
            "dataset_config": dataset_config,
            "validation_config": validation_config,
            "metadata": metadata,
            "resume_from_checkpoint": resume_from_checkpoint,
        }
        for name, value in options.items():
            if value is not None:
                raise _unsupported(name, value, "nothing")
        _expect_type("scaling_config", scaling_config, ScalingConfig)
        _expect_type("run_config", run_config, RunConfig)
        _expect_type("torch_config", torch_config, TorchConfig)
        self._function = train_loop_per_worker
        self._config = dict(train_loop_config or {})
        self._scaling = scaling_config or ScalingConfig()
        self._run = run_config or RunConfig()
        self._torch = torch_config or TorchConfig()
        if "nccl" in (self._torch.backend or "") and not self._scaling.gpus:
            raise _unsupported("torch_config.backend", self._torch.backend, "gloo without GPUs")

    def fit(self) -> Result:
        """Run the function on the cluster that this process is connected to, or on $RAY_ADDRESS or
        the cluster of this machine, until it has ended. Ctrl-C cancels the job. Raises UserError
        for invalid arguments, and TrainingFailedError with the reason of a job that fails."""
        from ..backends.ray import cluster
        from ..cli.options import ray_address

        cluster.connect(ray_address(""))
        client = Client(ray=cluster.head_address() or ray_address(""))
        title = self._run.name or function_title(self._function)
        words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-") or "train"
        job_name = f"{words}-{secrets.token_hex(2)}"
        name = self._run.name or job_name
        path = Path(self._run.storage_path or "~/ray_results").expanduser().absolute() / name
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            script = self._script(Path(folder), path, name)
            job = client.submit_made(script, self._document(job_name, script.name, _capacities()))
        try:
            view = job.wait()
        except KeyboardInterrupt:
            job.cancel()
            raise
        if view.state != "succeeded":
            text = f"job {job_name}: {view.state}: {view.reason}"
            raise TrainingFailedError("\n".join(filter(None, [text, view.traceback.rstrip()])))
        return _result(path, view)

    def _script(self, directory: Path, path: Path, name: str) -> Path:
        takes = any(
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            for parameter in inspect.signature(self._function).parameters.values()
        )
        keep = (self._run.checkpoint_config or CheckpointConfig()).num_to_keep
        before = [
            "from holdfast.workers.integrations import ray_train",
            f"ray_train.begin({str(path)!r}, {name!r}, {keep!r}, {self._torch.backend!r},"
            f" {self._torch.timeout_s!r})",
            "function = ray_train.keep_result(function)",
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
        return job_document(name, spec, "the Trainer")


def _result(path: Path, view: JobView) -> Result:
    """Result of a job that has succeeded. Raises UserError where this process does not see it."""
    try:
        returned = run_directory.returned(path)
    except FileNotFoundError:
        got = f"{path}, in which the workers have written and this process sees nothing"
        expected = "a directory that all nodes and this process share"
        fix = "the job has succeeded: read what it has written there, on the node of rank 0"
        raise UserError.of("storage_path", got, expected, fix) from None
    return Result(
        metrics=run_directory.metrics(path),
        checkpoint=run_directory.newest(path),
        path=str(path),
        view=view,
        best_checkpoints=run_directory.kept(path),
        _returned=returned,
    )


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


def _expect_type(field: str, config: object, expected: type) -> None:
    if config is not None and not isinstance(config, expected):
        got = f"{type(config).__module__}.{type(config).__name__}"
        raise _unsupported(field, got, f"holdfast.ray.{expected.__name__}")


def _unsupported(field: str, got: object, expected: str) -> UserError:
    fix = "see docs/user/python-client.md for what a Trainer takes"
    return UserError.of(field, repr(got)[:80], expected, fix)

"""Starting and finding jobs from Python: `from holdfast import Client`.

A job is started from a file in every case, by the command that a user would type: a spec of a
dict or a TrainingJob is written beside the notebook for as long as the start takes, so that its
paths are relative to the notebook's directory, and a function becomes a script with a pickle.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping, load_job, yaml_text
from ..api.v1alpha1.base import number_as_text
from ..cli.options import ray_address
from ..cli.script_job import ScriptRun
from ..errors import HoldfastError, UserError
from ..runtime.job_directory import Home
from ..runtime.observe.view import JobView
from .access import Access, ClusterAccess, LocalAccess, client_directory
from .function_script import function_title, write_script
from .handle import JobHandle


class Client:
    """Jobs of this machine, of a Ray cluster or of a Kubernetes cluster:

        Client()                                  # this machine
        Client(ray="auto")                        # also HOST:PORT, http://HOST:8265
        Client(kubernetes=True, namespace="team")

    Nothing connects before the first call. Raises UserError for arguments that exclude each other.
    """

    def __init__(
        self,
        *,
        home: str | Path | None = None,
        ray: str | None = None,
        kubernetes: bool = False,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | Path | None = None,
    ) -> None:
        """`home`: the directory of local jobs, $HOLDFAST_HOME or ~/.holdfast by default; with a
        cluster only what starts a job is kept there for a moment. `ray`: as `--ray`; empty is
        $RAY_ADDRESS, or auto. `namespace`, `context` and `kubeconfig` belong to `kubernetes`."""
        self._home = Home(home)
        chosen = {"namespace": namespace, "context": context, "kubeconfig": kubeconfig}
        if ray is not None and kubernetes:
            raise UserError.of("ray", "ray and kubernetes", "only one of them")
        for field, value in chosen.items():
            if value is not None and not kubernetes:
                got, fix = f"{value} without kubernetes", "add kubernetes=True"
                raise UserError.of(field, got, "it with kubernetes=True", fix)
        self._access: Access
        if kubernetes:
            words = [f"--{field}={value}" for field, value in chosen.items() if value is not None]
            where = f"Kubernetes, namespace {namespace}" if namespace else "Kubernetes"
            self._access = ClusterAccess("--kubernetes", *words, what=where)
        elif ray is not None:
            address = ray_address(ray)
            self._access = ClusterAccess(f"--ray={address}", what=f"Ray, {address}")
        else:
            self._access = LocalAccess(self._home)

    def __repr__(self) -> str:
        return f"<Holdfast client of {self._access.what}>"

    def jobs(self) -> list[JobView]:
        """The views of all jobs, sorted by name. Jobs that cannot be read are reported on
        stderr."""
        return self._access.views()

    def job(self, name: str) -> JobHandle:
        """A job that exists. Raises UserError that lists the existing jobs."""
        self._access.view(name)
        return JobHandle(self._access, name)

    def submit(
        self,
        job: TrainingJob | Mapping[str, Any] | str | os.PathLike[str] | Callable[..., object],
        *,
        name: str | None = None,
        nodes: int | None = None,
        workers: int | None = None,
        gpus: int | None = None,
        env: Mapping[str, str | float] | None = None,
        python: str | None = None,
        resume_args: Sequence[str] = (),
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> JobHandle:
        """Start a job; returns when it exists, while it starts its nodes.

        `job` is a spec (a TrainingJob, a dict, or the path of a YAML file), the path of a training
        script, or a function. The options are those of `holdfast run train.py`, for a script or a
        function without a spec: `nodes`, `workers` of each node (1), `gpus` of each worker (1 where
        there are some), `name`, `env` of the workers, another interpreter `python`,
        `resume_args` of each start that finds a checkpoint of the script. `args` are a script's
        words, or with `kwargs` a function's arguments. A relative path counts from the
        directory of the YAML file; without a file, from the current directory.

        Each worker calls the function once. cloudpickle pickles it with what it refers to (see
        docs/user/python-client.md), so it can be a function of a notebook, a lambda or a method.

        On a cluster the directory is uploaded. Raises SpecError for a wrong
        spec, UserError for invalid arguments, and then nothing has been started.
        """
        variables = {key: number_as_text(value) for key, value in (env or {}).items()}
        fields: dict[str, Any] = {"name": name, "nodes": nodes, "workers": workers, "gpus": gpus,
                   "env": variables or None, "python": python,
                   "resume_args": tuple(resume_args) or None}  # fmt: skip
        options = {field: value for field, value in fields.items() if value is not None}
        if isinstance(job, (TrainingJob, Mapping)):
            _refuse(options, args, kwargs, "a spec")
            spec = job if isinstance(job, TrainingJob) else job_from_mapping(job, "the job")
            return self._submit_document(job_to_mapping(spec))
        if callable(job):
            return self._submit_function(job, tuple(args), dict(kwargs or {}), options)
        file = Path(job)
        run = ScriptRun(file, tuple(map(str, args)), **options)
        if not run.is_script:
            _refuse(options, args, kwargs, str(file))
            return self._start(file, load_job(file).name)
        if kwargs:
            raise UserError.of("kwargs", f"it with {file}", "it with a function")
        return self._submit_document(run.document(self._name(run)))

    def _name(self, run: ScriptRun) -> str:
        return run.name or self._access.free_name(run.title())

    def _submit_document(self, document: dict[str, Any]) -> JobHandle:
        with _spec_beside(Path.cwd(), document) as file:
            return self._start(file, document["metadata"]["name"])

    def _submit_function(
        self,
        function: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: dict[str, Any],
    ) -> JobHandle:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            script = write_script(Path(folder), function, args, kwargs)
            name = self._name(ScriptRun(Path(f"{function_title(function)}.py"), **options))
            document = ScriptRun(Path(script.name), **options).document(name)
            return self.submit_made(script, document)

    def submit_made(self, script: Path, document: dict[str, Any]) -> JobHandle:
        """Start a job whose spec names this script: its directory is copied below the home. Raises
        as `submit`."""
        name = document["metadata"]["name"]
        place = self._place(name)
        job = place / "job"
        shutil.copytree(script.parent, job)
        _write(job / "job.yaml", document)
        try:
            handle = self._start(job / "job.yaml", name)
        except HoldfastError:  # after Ctrl-C the job may run, and needs its script
            _remove(place)
            raise
        if isinstance(self._access, ClusterAccess):
            _remove(place)  # a cluster has a copy
        return handle

    def _place(self, name: str) -> Path:
        """A new directory for what belongs to a job of this name."""
        place = client_directory(self._home, name) / secrets.token_hex(4)
        try:
            place.mkdir(parents=True, mode=0o700)
        except OSError as error:
            got = f"{self._home.path} ({error.strerror})"
            raise UserError.of("home", got, "a directory that can be written") from None
        return place

    def _start(self, file: Path, name: str) -> JobHandle:
        """Raises UserError for what the target rejects."""
        self._access.run("submit", str(file), "--json")
        return JobHandle(self._access, name)


def _refuse(
    options: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, what: str
) -> None:
    """Raises UserError for options that a spec has fields for."""
    for field in [*options, *(["args"] if args else []), *(["kwargs"] if kwargs else [])]:
        fix = "a spec has fields for it: see docs/user/job-spec.md"
        raise UserError.of(field, f"it with {what}", "it with a script or a function", fix)


def _remove(place: Path) -> None:
    """Delete the directory, and its parent if that is empty then."""
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        place.parent.rmdir()


@contextmanager
def _spec_beside(directory: Path, document: dict[str, Any]) -> Iterator[Path]:
    """A file with a spec whose paths are relative to `directory`. Raises UserError."""
    file = directory / f".holdfast-job-{secrets.token_hex(4)}.yaml"
    _write(file, document)
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _write(file: Path, document: dict[str, Any]) -> None:
    try:
        file.write_text(yaml_text(document), encoding="utf-8")
    except OSError as error:
        got = f"{file.parent} ({error.strerror})"
        fix = "the spec is written to the current directory while the job starts"
        raise UserError.of("current directory", got, "one that can be written", fix) from None

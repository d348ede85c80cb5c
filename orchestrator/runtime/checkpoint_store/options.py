"""Opening of a job's store: its path, and spec.env as driver options or as environment.

A process of one job applies spec.env to its environment (job_environment), and every driver finds
its settings there. A process of many jobs must not, or jobs would use each other's credentials: it
passes options to each driver (options_of_one_job) and rejects variables that have no option.

Sources: the parameters of s3fs.S3FileSystem, the environment variables of botocore
(https://docs.aws.amazon.com/sdkref/latest/guide/environment-variables.html) and fsspec's FSSPEC_*
(https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem, SpecError, installation
from holdfast.orchestrator.protocol import files

CHECKPOINT_FIELD = "spec.checkpoint.path"
LOCAL_SCHEMES = ("file", "local")
EXTRAS = {"s3": "s3", "s3a": "s3"}
"""URL scheme -> extra of Holdfast that installs the driver."""


def storage_place(path: str, spec_directory: str | Path) -> str:
    """Absolute directory or URL of a checkpoint path. Directories are relative to the spec file,
    because the processes of a job have different working directories."""
    scheme, is_url, rest = path.partition("://")
    if is_url and scheme not in LOCAL_SCHEMES:
        return path
    return str(files.resolve(spec_directory, rest if is_url else path).resolve())


def missing_driver(path: str, error: Exception) -> Problem:
    """The driver of the store cannot be imported; the fix says how to install it."""
    scheme = path.partition("://")[0]
    fix = "install that driver where the job runs, and here"
    if scheme in EXTRAS:
        fix = installation(EXTRAS[scheme])
    return Problem(CHECKPOINT_FIELD, f"{path} ({error})", "a URL whose driver is installed", fix)


@contextmanager
def job_environment(job: TrainingJob) -> Iterator[None]:
    """Apply spec.env to the environment of this process, as agents do; restored at the end."""
    before = {name: os.environ.get(name) for name in job.spec.env}
    os.environ.update(job.spec.env)
    settings = _fsspec_settings(job.spec.env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if settings is not None:
            settings[0].clear()
            settings[0].update(settings[1])


def _fsspec_settings(env: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Apply FSSPEC_* variables, which fsspec reads only when it is imported. Returns the live
    settings and a copy of the earlier ones."""
    if not any(name.startswith("FSSPEC_") for name in env):
        return None
    import fsspec.config

    live: dict[str, Any] = fsspec.config.conf
    before = {scheme: dict(values) for scheme, values in live.items()}
    fsspec.config.set_conf_env(live, {k: v for k, v in env.items() if k.startswith("FSSPEC_")})
    return live, before


S3_OPTIONS: dict[str, tuple[str, ...]] = {
    "AWS_ACCESS_KEY_ID": ("key",),
    "AWS_SECRET_ACCESS_KEY": ("secret",),
    "AWS_SESSION_TOKEN": ("token",),
    "AWS_ENDPOINT_URL": ("endpoint_url",),
    "AWS_ENDPOINT_URL_S3": ("endpoint_url",),
    "AWS_DEFAULT_REGION": ("client_kwargs", "region_name"),
    "AWS_MAX_ATTEMPTS": ("config_kwargs", "retries", "total_max_attempts"),
    "AWS_RETRY_MODE": ("config_kwargs", "retries", "mode"),
    "AWS_REQUEST_CHECKSUM_CALCULATION": ("config_kwargs", "request_checksum_calculation"),
    "AWS_RESPONSE_CHECKSUM_VALIDATION": ("config_kwargs", "response_checksum_validation"),
}
"""Variable -> key of its value in the driver's options; a later one wins."""
S3_IGNORED = ("AWS_REGION", "AWS_EC2_METADATA_DISABLED", "AWS_PAGER", "AWS_DEFAULT_OUTPUT")
"""Variables that this driver ignores."""
CLIENTS = ("botocore", "aiobotocore", "aiohttp")
"""Clients whose exceptions quote an answer, except botocore's whose `fmt` has no other error."""
NUMBERS = ("AWS_MAX_ATTEMPTS",)
MOST_ATTEMPTS = 5
MOST_WAIT_S = 20.0
"""Limit for a connection, and for the next bytes. s3fs repeats the attempts of botocore five times.
With these bounds a driver answers or fails within ten minutes, whatever spec.env says, and does not
occupy a thread of a process of many jobs without end."""
SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "abfs": "az",
    "abfss": "az",
    "az": "az",
}
PREFIXES = {
    "s3": ("AWS_",),
    "gs": ("GOOGLE_", "GCLOUD_", "STORAGE_EMULATOR_HOST"),
    "az": ("AZURE_",),
}
"""Kind of store -> prefixes of the variables that its driver reads from the environment."""


class StorageOptions(NamedTuple):
    options: dict[str, Any]
    """Arguments for fsspec beside the URL."""
    left: tuple[str, ...]
    """Variables in spec.env that the driver reads and that have no option."""


def access(path: str, env: Mapping[str, str]) -> StorageOptions:
    """The options that spec.env gives to the driver of a checkpoint path. Raises SpecError for a
    value that is not valid."""
    scheme, is_url, _ = path.partition("://")
    if not is_url:
        return StorageOptions({}, ())
    kind = SCHEMES.get(scheme, "")
    options: dict[str, Any] = {}
    allowed = S3_OPTIONS if kind == "s3" else {}
    for name in allowed:
        if name in env:
            _put(options, allowed[name], _value(name, env[name]))
    left = tuple(
        name
        for name in env
        if name.startswith(PREFIXES.get(kind, ())) and name not in (*allowed, *S3_IGNORED)
    )
    options.update(_fsspec_options(scheme, kind, env))
    return StorageOptions(options, left)


def own_options(job: TrainingJob, path: str) -> dict[str, Any] | None:
    """All options of the job's store; None: the driver may also read the environment, so that the
    options alone are not enough."""
    scheme, is_url, _ = path.partition("://")
    options, left = access(path, job.spec.env)
    if is_url and (left or SCHEMES.get(scheme) != "s3"):
        return None
    return options


def answer_of(error: Exception) -> str:
    """A server's answer, by known codes and numbers only; empty if the error is not about an
    answer. The text of an answer may be secret: a job can make the operator ask a server that the
    job itself cannot reach."""
    response = getattr(error.__cause__ or error, "response", None)
    if isinstance(response, Mapping):  # of botocore.exceptions.ClientError
        from s3fs.errors import ERROR_CODE_TO_EXCEPTION

        code = str((response.get("Error") or {}).get("Code"))
        status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        is_known = code in ERROR_CODE_TO_EXCEPTION and not code.isdecimal()
        return code if is_known else f"HTTP status {status}"
    if type(error).__module__.partition(".")[0] not in CLIENTS:
        return ""
    return type(error).__name__ if "{error}" in getattr(error, "fmt", "{error}") else str(error)


def connects_at_once(path: str) -> bool:
    """True if the driver may connect to the store when it is created, without a time limit."""
    scheme, is_url, _ = path.partition("://")
    return bool(is_url) and SCHEMES.get(scheme) != "s3"


def _value(name: str, text: str) -> str | int:
    if name not in NUMBERS:
        return text.lower() if name.startswith(("AWS_REQUEST_", "AWS_RESPONSE_")) else text
    try:
        return int(text)
    except ValueError:
        raise SpecError([Problem(f"spec.env.{name}", text, "a number")]) from None


def _put(options: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        options = options.setdefault(part, {})
    options[path[-1]] = value


def _fsspec_options(scheme: str, kind: str, env: Mapping[str, str]) -> dict[str, Any]:
    """FSSPEC_S3_KEY=... and others, which fsspec reads only from the environment of the process."""
    import fsspec.config

    config: dict[str, dict[str, Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names of another form, which are ignored
        ours = {name: value for name, value in env.items() if name.startswith("FSSPEC_")}
        fsspec.config.set_conf_env(config, ours)
    merged: dict[str, Any] = {}
    for name in [*(prefix for prefix, of in SCHEMES.items() if of == kind and kind), scheme]:
        merged.update(config.get(name, {}))
    return merged


def options_of_one_job(job: TrainingJob, path: str) -> dict[str, Any]:
    """Driver options from spec.env, in a process of many jobs, with retries bounded by
    MOST_ATTEMPTS and MOST_WAIT_S. Raises SpecError for settings that are not for one job alone."""
    options, left = access(path, job.spec.env)
    if left:
        expected = "settings of the store that can be given to one job alone"
        fix = f"use {_instead(path)}; it must be reachable from the operator as from the nodes"
        raise SpecError(
            [Problem(f"spec.env.{name}", "a setting for a whole process", expected, fix)
             for name in left]
        )  # fmt: skip
    if SCHEMES.get(path.partition("://")[0]) == "s3":
        _bound(options.get("config_kwargs"))
    return options


def _bound(config: Any) -> None:
    """Lower what exceeds the bounds."""
    if not isinstance(config, dict):
        return
    for where, name, most in (
        (config, "connect_timeout", MOST_WAIT_S),
        (config, "read_timeout", MOST_WAIT_S),
        (config.get("retries"), "total_max_attempts", MOST_ATTEMPTS),
        (config.get("retries"), "max_attempts", MOST_ATTEMPTS),
    ):
        if isinstance(where, dict) and name in where:
            value = where[name]
            fits = isinstance(value, int | float) and 0 < value <= most
            where[name] = value if fits else most


def _instead(path: str) -> str:
    scheme = path.partition("://")[0]
    if SCHEMES.get(scheme) == "s3":
        return "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or FSSPEC_S3_*"
    return f"FSSPEC_{scheme.upper()}_* with an option of its fsspec driver"

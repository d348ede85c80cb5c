"""A job's way to its store without this process' environment: spec.env as options of the driver.

Owns: which variables that is possible for. Must not: open the store, or read this process' own
environment; what a job does not say, the driver looks for where it always does.

A process of one job may put spec.env into its environment (surroundings.job_environment) and every
driver finds what it knows. A process of many jobs must not: they would use each other's keys. It
gives each driver its options, and refuses variables that it cannot turn into such.

Sources: the parameters of s3fs.S3FileSystem, the environment variables of botocore
(https://docs.aws.amazon.com/sdkref/latest/guide/environment-variables.html) and fsspec's FSSPEC_*
(https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem, SpecError

from .store import CheckpointStore

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
"""Variable -> where its value goes among the driver's options; a later one wins."""
S3_SILENT = ("AWS_REGION", "AWS_EC2_METADATA_DISABLED", "AWS_PAGER", "AWS_DEFAULT_OUTPUT")
"""Say nothing to this driver."""
NUMBERS = ("AWS_MAX_ATTEMPTS",)
MOST_ATTEMPTS = 5
MOST_WAIT_S = 20.0
"""For a connection, and for the next bytes. s3fs tries five times what it is told to try so often:
whatever a job asks for, its driver has an answer or an error within ten minutes, and does not hold
a thread of a process of many jobs for ever."""
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
"""Kind of store -> how the variables begin that its driver reads by itself."""


class StorageOptions(NamedTuple):
    """How a job's store is opened."""

    options: dict[str, Any]
    """For fsspec, beside the URL."""
    left: tuple[str, ...]
    """Variables of the job that its driver would read and that are no options of it."""


def access(path: str, env: Mapping[str, str]) -> StorageOptions:
    """What spec.env says to the driver of a checkpoint path. Raises SpecError for a variable whose
    value cannot be one."""
    scheme, is_url, _ = path.partition("://")
    if not is_url:
        return StorageOptions({}, ())
    kind = SCHEMES.get(scheme, "")
    options: dict[str, Any] = {}
    known = S3_OPTIONS if kind == "s3" else {}
    for name in known:
        if name in env:
            _put(options, known[name], _value(name, env[name]))
    left = tuple(
        name
        for name in env
        if name.startswith(PREFIXES.get(kind, ())) and name not in (*known, *S3_SILENT)
    )
    options.update(_fsspec_options(scheme, kind, env))
    return StorageOptions(options, left)


def own_options(job: TrainingJob, path: str) -> dict[str, Any] | None:
    """Options that say all that the job's store needs to know; None: its driver looks for more in
    the environment, or for nobody knows what."""
    scheme, is_url, _ = path.partition("://")
    options, left = access(path, job.spec.env)
    if is_url and (left or SCHEMES.get(scheme) != "s3"):
        return None
    return options


def connects_at_once(path: str) -> bool:
    """Whether the driver may talk to the store while it is being made, for as long as that takes;
    False: it is known not to."""
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
    """FSSPEC_S3_KEY=... and the like. fsspec reads them once, from the process' environment."""
    import fsspec.config

    found: dict[str, dict[str, Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are not like that; they say nothing here
        ours = {name: value for name, value in env.items() if name.startswith("FSSPEC_")}
        fsspec.config.set_conf_env(found, ours)
    merged: dict[str, Any] = {}
    for name in [*(one for one, of in SCHEMES.items() if of == kind and kind), scheme]:
        merged.update(found.get(name, {}))
    return merged


def storage_of(job: TrainingJob, path: str, key: str) -> CheckpointStore:
    """The storage tier of one of many jobs in this process. `path` is where its checkpoints are,
    `key` the job's name in manifests. Of patience it gets so much and no more (MOST_ATTEMPTS,
    MOST_WAIT_S).

    Raises SpecError for settings in spec.env that cannot be had for one job alone, UserError as
    Storage does.
    """
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
    return CheckpointStore(path, key, options)


def _bound(config: Any) -> None:
    """Less patience, where a job asks for too much of it."""
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

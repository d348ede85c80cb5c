"""Connecting this process to a Ray cluster, with one clear error for each way that can fail."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from holdfast.orchestrator.errors import HoldfastError, Problem, UserError, installation

from . import names

OLDEST = (2, 51)
"""Version that `make test-ray-oldest` runs. Bundles that choose nodes by label came with 2.49."""
CONNECT_TIMEOUT_S = 15.0
CLIENT = "ray://"
"""Prefix of the address of a Ray client's server."""
CLIENT_TRIES = 2
"""A Ray client's server starts a process for each client. It gives up on one that takes half a
minute, and on a busy head some crash in the fork (ray-project/ray, issue 63202)."""
NO_LOCAL_NODE = ("No node info found", "This node has an IP address of")
"""Errors of newer and older Rays when no raylet of the cluster is on this machine."""

log = logging.getLogger(__name__)


class ClusterGone(HoldfastError):
    """The cluster does not answer."""


def connect(address: str, metadata: dict[str, str] | None = None) -> None:
    """Make this process a driver of the cluster. The dashboard shows `metadata` for it, unless it
    is the driver of a submitted job, which has its own. Raises UserError with the reason."""
    try:
        import ray
    except ImportError:
        raise UserError.of(
            "--ray", "no Ray here", "Ray to be installed", installation("ray")
        ) from None
    check_version(ray.__version__)
    through_client = address.startswith(CLIENT)
    explicit = address not in ("auto", "")
    if explicit:
        check_listens(address)  # also in a process that is connected: it may be another cluster
    if ray.is_initialized():
        return
    _keep_ray_off_stdout()
    if through_client:
        _hide_closed_channels()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if explicit and not through_client:
        _check_local_raylet(address)
    options: dict[str, Any] = {}
    # A Ray client sends its options as JSON, which a JobConfig is not.
    if metadata and not through_client and not submission_id():
        options["job_config"] = ray.job_config.JobConfig(metadata=metadata)
    try:
        _init(
            address=address or "auto", namespace=names.NAMESPACE, log_to_driver=False, **options,
            logging_level=logging.ERROR, configure_logging=False,
        )  # fmt: skip
    except ConnectionAbortedError as error:
        raise _client_not_served(address, _reason(error)) from None
    except ConnectionError as error:
        raise _no_cluster(address, _reason(error)) from None
    except ray.exceptions.RayError as error:  # a token that cannot be read
        raise _no_cluster(address, " ".join(str(error).split())) from None
    except RuntimeError as error:  # Ray raises it when versions differ
        if any(words in str(error) for words in NO_LOCAL_NODE):
            raise _not_on_this_machine(address) from None
        if "version" not in str(error).lower():
            raise
        got = " ".join(str(error).split())
        expected = "the same Ray and Python here and in the cluster"
        raise UserError.of("--ray", f"{address} ({got})", expected) from None


def _keep_ray_off_stdout() -> None:
    """Every driver prints each lost Ray node of the cluster to stdout, where a command's answer
    (--json) goes. Ray has no option for it: log_to_driver=False does not stop it."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, **_: log.debug("ray: %s", data.get("lines"))


def _hide_closed_channels() -> None:
    """A Ray client closes a lost connection while a thread of grpc still reads it, and Python
    prints the traceback of that thread. The command itself reports the loss."""
    before = threading.excepthook

    def hook(raised: threading.ExceptHookArgs) -> None:
        if raised.exc_type is ValueError and "Channel closed" in str(raised.exc_value):
            log.debug("grpc: %s", raised.exc_value)
        else:
            before(raised)

    threading.excepthook = hook


def check_version(version: str, cluster: str = "") -> None:
    """Raises UserError for a Ray that is too old: the local one, or the one of a cluster."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers >= OLDEST:
        return
    oldest = ".".join(map(str, OLDEST))
    fix = f"pip install 'ray>={oldest}'"
    problem = Problem("ray", version, f"{oldest} or newer", fix)
    if cluster:
        got = f"{cluster} (a cluster of Ray {version})"
        problem = Problem("--ray", got, f"one of Ray {oldest} or newer", f"{fix} on its nodes")
    raise UserError(str(problem))


def submission_id() -> str:
    """Id of the Ray job that this process belongs to; empty outside of one."""
    try:
        # Ray's job server sets it for a driver; no other process has it.
        config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    except ValueError:
        return ""
    return str(config.get("metadata", {}).get("job_submission_id", ""))


def head_address() -> str:
    """HOST:PORT of the head; empty through a Ray client, which only reaches its server."""
    import ray

    if ray.util.client.ray.is_connected():
        return ""
    return str(ray.get_runtime_context().gcs_address)


def _init(**options: Any) -> None:
    import ray

    for tries_left in reversed(range(CLIENT_TRIES)):
        try:
            with _own_sigterm(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Ray Client connection timed out")
                ray.init(**options)
            return
        except ConnectionAbortedError as error:  # a Ray client's server could not serve this one
            if not tries_left:
                raise
            log.warning("%s: %s; trying again", options["address"], _reason(error))


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps this process's SIGTERM handler: Ray installs one that prints a stack."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _reason(error: ConnectionError) -> str:
    """The cause in one line: a Ray client's server answers with its own traceback, which has it in
    the last line. Older Rays give no text at all when no head answers, or only a newer one does."""
    import ray

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"no head of Ray {ray.__version__}, the version here, answers"
    return lines[-1].partition(": ")[2] or lines[-1] if "Traceback" in str(error) else lines[0]


def check_listens(address: str) -> None:
    """Raises UserError. Ray itself would try for minutes."""
    try:
        socket.create_connection(_host_and_port(address), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from None


def token_problem(address: str, *, refused: bool) -> UserError:
    """The cluster has token authentication, Ray's default from 2.61."""
    why = "refuses the token of this process" if refused else "demands a token, and none is here"
    expected = (
        "RAY_AUTH_MODE=token and the cluster's token in RAY_AUTH_TOKEN, in the file that "
        "RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token"
    )
    fix = "`ray get-auth-token` on the head prints it"
    return UserError.of("--ray", f"{address} (the cluster {why})", expected, fix)


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix(CLIENT).rpartition(":")
    if not colon or not port.isdecimal():
        expected = "auto, HOST:PORT of the cluster's head, ray://HOST:PORT or http://HOST:PORT"
        raise UserError.of("--ray", address, expected)
    return host.strip("[]"), int(port)  # an IPv6 address stands in brackets


def _check_local_raylet(address: str) -> None:
    """Raises UserError. Ray would look for a raylet of this machine for a minute."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet":
            return
    raise _not_on_this_machine(address)


def _not_on_this_machine(address: str) -> UserError:
    host = address.rpartition(":")[0]
    expected = f"http://{host}:8265 (the dashboard's port) or ray://{host}:10001"
    got = f"{address} (no Ray node of that cluster runs on this machine)"
    fix = "HOST:PORT of the head is for commands on a machine of the cluster"
    return UserError.of("--ray", got, expected, fix)


def _client_not_served(address: str, why: str) -> UserError:
    host = address.removeprefix(CLIENT).rpartition(":")[0]
    expected = "a head that starts a process for each Ray client"
    fix = (
        f"http://{host}:8265 needs none; if the head's are crashing, "
        "`GRPC_ENABLE_FORK_SUPPORT=0 ray start --head` is known to help"
    )
    return UserError.of("--ray", f"{address} ({why})", expected, fix)


def _no_cluster(address: str, why: str) -> UserError:
    fix = "`ray status` on the head shows whether it runs; `ray start --head` starts one"
    return UserError.of("--ray", f"{address} ({why})", "the address of a running Ray cluster", fix)

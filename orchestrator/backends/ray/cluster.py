"""The Ray cluster that this process belongs to: connecting, and facts about it.

Owns: what is asked of Ray outside of actors and placement groups. Must not: know the job's state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from holdfast.orchestrator.errors import HoldfastError, Problem, UserError

from . import jobs_page, names

OLDEST = (2, 51)
"""What `make test-ray-oldest` runs with. Bundles that choose nodes by label came with 2.49."""
CONNECT_TIMEOUT_S = 15.0
CLIENT = "ray://"
"""What stands before the address of a Ray client's server."""
CLIENT_TRIES = 2
"""A Ray client's server starts a process for each client. It gives up on one that takes half a
minute, and on a busy head some crash in the fork (ray-project/ray, issue 63202)."""

OUTSIDE = ("No node info found", "This node has an IP address of")
"""How Ray, newer and older, says that no raylet of the cluster is on this machine."""

log = logging.getLogger(__name__)


class ClusterGone(HoldfastError):
    """The cluster does not answer."""


def connect(address: str, metadata: dict[str, str] | None = None) -> None:
    """Make this process a driver of the cluster, shown with this metadata in the dashboard where
    it is no submitted job, which has its own. Raises UserError naming what is wrong."""
    try:
        import ray
    except ImportError:
        fix = "pip install '.[ray]' in a checkout of Holdfast"
        raise UserError(str(Problem("--ray", "no Ray here", "Ray to be installed", fix))) from None
    check_version(ray.__version__)
    outside = address.startswith(CLIENT)
    given = address not in ("auto", "")
    if given:
        check_listens(address)  # also where the process is in a cluster: it may be another
    if ray.is_initialized():
        return
    _keep_stdout()
    if outside:
        _keep_tracebacks_of_grpc()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if given and not outside:
        _check_inside(address)
    shown: dict[str, Any] = {}
    # A Ray client sends its options as JSON, which a JobConfig is not.
    if metadata and not outside and not jobs_page.submission_id():
        shown["job_config"] = ray.job_config.JobConfig(metadata=metadata)
    try:
        _init(
            address=address or "auto", namespace=names.NAMESPACE, log_to_driver=False, **shown,
            logging_level=logging.ERROR, configure_logging=False,
        )  # fmt: skip
    except ConnectionAbortedError as error:
        raise _not_served(address, _reason(error)) from None
    except ConnectionError as error:
        raise _nobody(address, _reason(error)) from None
    except RuntimeError as error:  # Ray's way to say that versions differ
        if any(words in str(error) for words in OUTSIDE):
            raise _outside(address) from None
        if "version" not in str(error).lower():
            raise
        got = " ".join(str(error).split())
        expected = "the same Ray and Python here and in the cluster"
        raise UserError(str(Problem("--ray", f"{address} ({got})", expected))) from None


def _keep_stdout() -> None:
    """Stdout is for answers, and Ray prints everybody's troubles there: it tells every driver of
    each node of the cluster that is lost, also with log_to_driver=False. What of that is a job's,
    its events tell."""
    from ray._private import worker  # nothing public stops it

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda said, **_: log.debug("ray: %s", said.get("lines"))


def _keep_tracebacks_of_grpc() -> None:
    """A Ray client closes a connection that it has lost while a thread of grpc's still looks at it,
    and Python prints what that thread raises. What it means, the command says."""
    before = threading.excepthook

    def told(raised: threading.ExceptHookArgs) -> None:
        if raised.exc_type is ValueError and "Channel closed" in str(raised.exc_value):
            log.debug("grpc: %s", raised.exc_value)
        else:
            before(raised)

    threading.excepthook = told


def check_version(version: str, cluster: str = "") -> None:
    """Raises UserError for a Ray that cannot do what is needed: this one, or that of the cluster at
    an address."""
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


def _init(**options: Any) -> None:
    import ray

    for tries_left in reversed(range(CLIENT_TRIES)):
        try:
            with _own_end(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Ray Client connection timed out")  # told below
                ray.init(**options)
            return
        except ConnectionAbortedError as error:  # a Ray client's server could not serve this one
            if not tries_left:
                raise
            log.warning("%s: %s; trying again", options["address"], _reason(error))


@contextmanager
def _own_end() -> Iterator[None]:
    """Ray makes a process that joins a cluster print a stack when it is asked to end, and end as if
    of itself. A command ends as it did before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _reason(error: ConnectionError) -> str:
    """What went wrong, in a line: the Ray client's server answers with its own traceback, which
    tells it in the last one. Older Rays say nothing at all when no head answers, or a newer one."""
    import ray

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"nobody answers there as a head of Ray {ray.__version__}, the one here, does"
    return lines[-1].partition(": ")[2] or lines[-1] if "Traceback" in str(error) else lines[0]


def check_listens(address: str) -> None:
    """Ray tries for very long, and says little."""
    try:
        socket.create_connection(_host_and_port(address), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _nobody(address, error.strerror or str(error)) from None


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix(CLIENT).rpartition(":")
    if not colon or not port.isdecimal():
        expected = "auto, HOST:PORT of the cluster's head, ray://HOST:PORT or http://HOST:PORT"
        raise UserError(str(Problem("--ray", address, expected)))
    return host.strip("[]"), int(port)  # an IPv6 address stands in brackets


def _check_inside(address: str) -> None:
    """Ray looks for a raylet of this machine for a minute, and then says that there is none."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet":
            return
    raise _outside(address)


def _outside(address: str) -> UserError:
    host = address.rpartition(":")[0]
    expected = f"http://{host}:8265 (the dashboard's port) or ray://{host}:10001"
    got = f"{address} (no Ray node of that cluster runs on this machine)"
    fix = "HOST:PORT of the head is for commands on a machine of the cluster"
    return UserError(str(Problem("--ray", got, expected, fix)))


def _not_served(address: str, why: str) -> UserError:
    host = address.removeprefix(CLIENT).rpartition(":")[0]
    expected = "a head that starts a process for each Ray client"
    fix = (
        f"http://{host}:8265 needs none; if the head's are crashing, "
        "`GRPC_ENABLE_FORK_SUPPORT=0 ray start --head` is known to help"
    )
    return UserError(str(Problem("--ray", f"{address} ({why})", expected, fix)))


def _nobody(address: str, why: str) -> UserError:
    fix = "`ray status` on the head says whether it runs; `ray start --head` starts one"
    return UserError(
        str(Problem("--ray", f"{address} ({why})", "the address of a running Ray cluster", fix))
    )


def here() -> dict[str, str]:
    """The Ray node of this process."""
    import ray

    context = ray.get_runtime_context()
    return {
        "ray_node": context.get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "hostname": socket.gethostname(),
    }


def log_directory(job: str, job_id: str) -> Path:
    """Where the dashboard's log view finds a job's files, on this Ray node."""
    import ray

    node = ray._private.worker._global_node  # Ray tells its session directory nowhere else
    return Path(node.get_logs_dir_path()) / f"holdfast-{job}-{job_id[:6]}"


def alive_nodes() -> dict[str, dict[str, Any]]:
    """Ray nodes by id, as the head sees them."""
    import ray

    return {str(one["NodeID"]): one for one in ray.nodes() if one["Alive"]}


async def listens(node: dict[str, Any]) -> bool | None:
    """Whether a Ray node's own server (raylet) takes connections. False: it has ended; the head
    notices that only after missed health checks, its kernel says so at once. None: nobody has said
    either. No answer, no way there or no file left for a connection may well be our own trouble."""
    place = str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])
    try:
        async with asyncio.timeout(1.0):
            _reader, writer = await asyncio.open_connection(*place)
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    writer.close()
    return True


def shortage(count: int, bundle: dict[str, float]) -> str:
    """Why that many bundles find no place: what is there, and what is missing."""
    import ray

    nodes = alive_nodes()
    large = [one for one in nodes.values() if fits(bundle, one["Resources"])]
    free = ray.available_resources()
    total = ray.cluster_resources()
    parts = [f"{free.get(k, 0.0):g} of {total.get(k, 0.0):g} {k}" for k in bundle]
    return (
        f"{count} more nodes of {words(bundle)} each on a Ray node of its own: the cluster has "
        f"{len(nodes)} Ray nodes, {len(large)} of them that large; free are {', '.join(parts)}"
    )


def fits(bundle: dict[str, float], resources: dict[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in bundle.items())


def words(bundle: dict[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in bundle.items())

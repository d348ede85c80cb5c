"""A real node launcher with real agents, and a fake controller in the process of the test."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.orchestrator.protocol import launcher_protocol as h
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Membership, Restore, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh

TOKEN = "0123456789abcdef"
PATIENCE_S = 60.0
T = TypeVar("T")


class Timeout(AssertionError):
    """The expected message did not come."""


class FakeController:
    """A controller for any number of agents, which keeps all messages that it receives."""

    def __init__(
        self, directory: Path, welcome: m.Welcome, context: ssl.SSLContext | None = None
    ) -> None:
        self._directory = directory
        self.welcome = welcome
        self._context = context
        self._condition = threading.Condition()
        self.received: list[tuple[float, str, m.Message]] = []
        self._links: dict[str, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._next_action = 0
        self.address = ("", 0)

    def open(self) -> None:
        listener = self._listener = socket.create_server(("127.0.0.1", 0))
        endpoint = self._directory / "controller.json"
        temporary = endpoint.with_suffix(".tmp")
        address, port = self.address = listener.getsockname()
        temporary.write_text(json.dumps({"address": address, "port": port}))
        temporary.rename(endpoint)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Close all connections, as after a kill."""
        with self._condition:
            links = [*self._links.values(), *([self._listener] if self._listener else [])]
            self._links = {}
            self.received = []
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(sock,), daemon=True).start()

    def _receive(self, sock: socket.socket) -> None:
        node = ""
        try:
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            with sock.makefile("rb") as stream:
                while len(header := stream.read(4)) == 4:
                    message = m.decode(stream.read(m.frame_length(header)))
                    with self._condition:
                        if isinstance(message, m.Hello):
                            node = message.node
                            self._links[node] = sock
                            sock.sendall(m.encode(self.welcome))
                        assert isinstance(message, m.Message)
                        self.received.append((time.monotonic(), node, message))
                        self._condition.notify_all()
        except (OSError, ValueError):
            return

    def send(self, node: str, message: m.Message) -> None:
        with self._condition:
            self._links[node].sendall(m.encode(message))

    def action(self) -> int:
        self._next_action += 1
        return self._next_action

    def wait(self, kind: type[T], node: str = "", where: Callable[[T], bool] = lambda _: True) -> T:
        """The first message of a kind for which `where` is true, received already or later."""
        deadline = time.monotonic() + PATIENCE_S
        with self._condition:
            while True:
                for _, sender, message in self.received:
                    if isinstance(message, kind) and node in ("", sender) and where(message):
                        return message
                if not self._condition.wait(deadline - time.monotonic()):
                    seen = "\n".join(repr(x)[:300] for x in self.received[-10:])
                    raise Timeout(f"no {kind.__name__} from {node or 'any node'} in:\n{seen}")

    def forget(self) -> None:
        with self._condition:
            self.received = []


class Rig:
    """A job directory, a node launcher, agents and the controller."""

    def __init__(self, directory: Path, entrypoint: dict[str, Any], **spec: Any) -> None:
        self.directory = directory
        (directory / "token").write_text(TOKEN)
        (directory / "logs").mkdir()
        document = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "test"},
            "spec": {
                "entrypoint": entrypoint,
                "nodes": {"min": 1, "max": 2},
                "workersPerNode": 2,
                "resources": {"gpu": 0},
                **spec,
            },
        }
        self.controller = FakeController(
            directory,
            m.Welcome(
                spec=document,
                spec_directory=str(directory),
                checkpoint_path=str(directory / "checkpoints"),
                log_directory=str(directory / "logs"),
                heartbeat_interval_s=0.2,
            ),
        )
        self.controller.open()
        self.nodes: dict[str, int] = {}
        self.launcher: subprocess.Popen[bytes] | None = None

    # -- the launcher -------------------------------------------------------------------------
    def start_launcher(self) -> None:
        log = (self.directory / "logs" / "host.log").open("wb")
        module = "holdfast.workers.agent.process.node_launcher"
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", module, "--socket", str(self.socket_path)],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()

    @property
    def socket_path(self) -> Path:
        return self.directory / "host.sock"

    def connect_launcher(self) -> socket.socket:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(self.socket_path))
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                assert self.launcher is not None and self.launcher.poll() is None, (
                    self.launcher_log()
                )
                assert time.monotonic() < deadline, self.launcher_log()
                select.select([], [], [], 0.02)
                continue
            sock.settimeout(PATIENCE_S)
            first = receive_from_launcher(sock)
            assert isinstance(first, h.NodeList)
            return sock

    def launcher_log(self) -> str:
        return (self.directory / "logs" / "host.log").read_text()

    def start_node(self, sock: socket.socket, node: str, **more: Any) -> int:
        """Returns the pid of the agent after its Hello."""
        self.request_node(sock, node, **more)
        while True:
            message = receive_from_launcher(sock)
            if isinstance(message, h.NodeList) and node in message.nodes:
                break
        self.nodes[node] = message.nodes[node]
        self.controller.wait(m.Hello, node)
        return self.nodes[node]

    def request_node(self, sock: socket.socket, node: str, **more: Any) -> None:
        start = h.StartNode(
            node=node,
            job="test",
            slots=2,
            token_file=str(self.directory / "token"),
            endpoint_file=str(self.directory / "controller.json"),
            log_file=str(self.directory / "logs" / f"agent-{node}.log"),
            **more,
        )
        send_to_launcher(sock, start)

    # -- generations --------------------------------------------------------------------------
    def finished(self, node: str, generation: int) -> None:
        """Wait until both workers have finished the script."""
        self.controller.wait(
            m.Heartbeat,
            node,
            lambda b: b.generation == generation and [w.step for w in b.workers] == [1000, 1000],
        )

    def launch(
        self,
        node: str,
        generation: int,
        *,
        restore: Restore | None = None,
        buddy: tuple[str, int] = ("", 0),
        persist_every_steps: int = 0,
        mesh: Mesh | None = None,
    ) -> m.Launched:
        action = self.controller.action()
        membership = Membership(
            generation=generation,
            mesh=mesh or Mesh(shard=2),
            num_nodes=1,
            workers_per_node=2,
            master_address="127.0.0.1",
            master_port=1,
            restart_count=generation - 1,
            restore=restore,
        )
        message = m.LaunchWorkers(
            action_id=action,
            membership=membership,
            node_rank=0,
            seats=tuple(WorkerSeat(rank, rank, rank, True) for rank in range(2)),
            buddy=buddy[0],
            buddy_address="127.0.0.1",
            buddy_port=buddy[1],
            persist_every_steps=persist_every_steps,
        )
        self.controller.send(node, message)
        return self.controller.wait(m.Launched, node, lambda x: x.action_id == action)

    def stop(self, node: str, generation: int, **more: Any) -> m.GroupStopped:
        action = self.controller.action()
        self.controller.send(node, m.StopWorkers(action_id=action, generation=generation, **more))
        return self.controller.wait(m.GroupStopped, node, lambda x: x.action_id == action)

    def pids(self, node: str) -> dict[str, list[int]]:
        """Processes of an agent: its forkserver and the forkserver's children."""
        servers = children_of(self.nodes[node])
        return {"server": servers, "workers": [p for s in servers for p in children_of(s)]}

    def log(self, generation: int, rank: int) -> str:
        path = self.directory / "logs" / f"gen-{generation:04d}" / f"rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        """Kill all remaining processes; tests look for orphans before this."""
        if self.launcher is not None:
            # Not all that have started: the pid of an ended one may be this process's thread.
            for pid in children_of(self.launcher.pid) if self.launcher.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.launcher.kill()
            self.launcher.wait()
        self.controller.close()


def receive_from_launcher(sock: socket.socket) -> h.FromLauncher:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = sock.recv(count - len(data))
            assert part, "the launcher closed the connection"
            data += part
        return data

    body = exactly(int.from_bytes(exactly(4), "big"))
    return msgspec.msgpack.decode(body, type=h.FromLauncher)


def send_to_launcher(sock: socket.socket, message: h.LauncherMessage) -> None:
    body = msgspec.msgpack.encode(message)
    sock.sendall(len(body).to_bytes(4, "big") + body)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


@contextlib.contextmanager
def watched(pids: list[int]) -> Iterator[Callable[[], None]]:
    """Yields a function that waits until all of these processes have ended."""
    fds = [os.pidfd_open(pid) for pid in pids]

    def gone() -> None:
        deadline = time.monotonic() + PATIENCE_S
        for pid, fd in zip(pids, fds, strict=True):
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            assert poll.poll(left_ms), f"process {pid} is still running"

    try:
        yield gone
    finally:
        for fd in fds:
            os.close(fd)

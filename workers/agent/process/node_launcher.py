"""The node launcher of the local backend: imports torch once per job and forks agents.

It must not start a thread. It outlives the controller and ends when it has no node and no
connection. Agents outlive it: they hold the job's memory, and the next launcher starts new ones.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.orchestrator.protocol import launcher_protocol as p
from holdfast.orchestrator.protocol.environment import VISIBLE_DEVICES
from holdfast.orchestrator.protocol.framing import UNDECODABLE, BadFrame, FrameReader, frame

from ..linux import output, processes
from ..linux.orphans import Orphans
from ..pool import preload
from .node import NodeOptions, run_node

LINGER_S = 10.0
"""Time without node and connection after which the launcher ends; a controller may restart."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[p.ToLauncher] = msgspec.msgpack.Decoder(p.ToLauncher)


class LauncherConnection:
    """The connection of one backend. Frames are small, so a blocking send does not wait long."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = FrameReader()

    def messages(self) -> list[p.ToLauncher] | None:
        """New messages; None when the backend has closed or does not speak our protocol."""
        try:
            part = self.sock.recv(65536)
        except ConnectionResetError:
            return None
        if not part:
            return None
        try:
            return [_DECODER.decode(body) for body in self._frames.feed(part)]
        except (BadFrame, *UNDECODABLE) as error:
            print(f"node launcher: {error}", file=sys.stderr)
            return None

    def send(self, message: p.FromLauncher) -> None:
        with contextlib.suppress(OSError):  # the next read notices a closed connection
            self.sock.sendall(frame(_ENCODER.encode(message)))


class NodeLauncher:
    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._selector = selectors.DefaultSelector()
        self._connections: list[LauncherConnection] = []
        self._nodes: dict[str, int] = {}
        self._pidfds: dict[str, int] = {}
        self._orphans = Orphans(lambda child: child in self._nodes.values())
        self._devices: dict[str, tuple[str, ...]] = {}
        """GPUs that are assigned to a node."""
        self._waiting: dict[str, p.StartNode] = {}
        """Nodes that wait for GPUs of nodes that have not ended yet."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def serve(self) -> NoReturn:
        self._path.unlink(missing_ok=True)
        mask = os.umask(0o177)  # the socket is for its owner only
        self._listener.bind(str(self._path))
        os.umask(mask)
        self._listener.listen(16)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._orphans.selector, selectors.EVENT_READ, self._orphans.reap)
        while True:
            idle = not self._nodes and not self._connections
            due_s = self._orphans.due_in_s()
            events = self._selector.select(due_s if due_s is not None or not idle else LINGER_S)
            if due_s is not None:
                self._orphans.reap()
                idle = False
            if idle and not events:
                self._leave()
            for key, _mask in events:
                if key.fileobj in self._selector.get_map():
                    key.data()

    # -- connections --------------------------------------------------------------------------
    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        connection = LauncherConnection(sock)
        self._connections.append(connection)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(connection))
        connection.send(self._node_list())

    def _read(self, connection: LauncherConnection) -> None:
        messages = connection.messages()
        if messages is None:
            self._selector.unregister(connection.sock)
            connection.sock.close()
            self._connections.remove(connection)
            return
        for message in messages:
            match message:
                case p.StartNode():
                    self._start(message)
                    self._broadcast(self._node_list())
                case p.StopNode():
                    self._waiting.pop(message.node, None)
                    self._kill(message.node)
                case p.StopLauncher():
                    self._waiting.clear()
                    for node in list(self._nodes):
                        self._kill(node)
                    for node, pid in list(self._nodes.items()):
                        self._reap(node, pid)
                    self._orphans.wait()
                    self._leave()

    def _node_list(self) -> p.NodeList:
        return p.NodeList(nodes=dict(self._nodes), devices=dict(self._devices))

    def _broadcast(self, message: p.FromLauncher) -> None:
        for connection in self._connections:
            connection.send(message)

    # -- nodes --------------------------------------------------------------------------------
    def _start(self, order: p.StartNode) -> None:
        if order.node in self._nodes:
            return
        if order.devices is not None:
            taken = {device for held in self._devices.values() for device in held}
            free = [device for device in order.devices if device not in taken]
            if len(free) < (count := order.num_devices or order.slots):
                self._waiting[order.node] = order
                return
            self._devices[order.node] = tuple(free[:count])
        assert preload.num_threads() == 1, "a library has started a thread in the node launcher"
        output.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(order)
            finally:
                os._exit(1)
        self._nodes[order.node] = pid
        pidfd = self._pidfds[order.node] = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(order.node, pid))

    def _become(self, order: p.StartNode) -> NoReturn:
        """Runs in the child: close the launcher's descriptors and run an agent."""
        log = output.log_descriptor(order.log_file)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        if order.node in self._devices:
            os.environ[VISIBLE_DEVICES] = ",".join(self._devices[order.node])
        run_node(
            NodeOptions(
                job=order.job,
                node=order.node,
                slots=order.slots,
                token_file=Path(order.token_file),
                endpoint_file=Path(order.endpoint_file),
                bind_address="127.0.0.1",
                log_file=Path(order.log_file),
            )
        )

    def _kill(self, node: str) -> None:
        pid = self._nodes.get(node)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)  # our child and not reaped: the pid is still valid

    def _reap(self, node: str, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        pidfd = self._pidfds.pop(node)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        del self._nodes[node]
        self._orphans.end()  # workers die with their agent, but what they started may not
        end = processes.describe_end(os.waitstatus_to_exitcode(status))
        self._broadcast(p.NodeEnded(node=node, detail=end))
        self._devices.pop(node, None)
        waiting, self._waiting = self._waiting, {}
        for order in waiting.values():
            self._start(order)
        if waiting:
            self._broadcast(self._node_list())

    def _leave(self) -> NoReturn:
        self._path.unlink(missing_ok=True)
        sys.stderr.flush()
        os._exit(0)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.workers.agent.process.node_launcher", description=__doc__
    )
    parser.add_argument("--socket", type=Path, required=True, help="where to listen")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a controller that starts may block SIGTERM
    output.never_fail()
    processes.adopt_orphans()
    processes.name_process("host")
    preload.preload()
    NodeLauncher(arguments.socket).serve()


if __name__ == "__main__":
    main()

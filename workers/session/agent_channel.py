"""The worker's connection to its agent: reports, staging buffers, shards.

Any thread may send (one message is one packet, which the kernel keeps whole); the training thread
receives, and on a GPU the thread that prepares buffers. The pulse thread reads the inspection
socket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.facts import WorkerPhase
from holdfast.workers import packets, worker_protocol, worker_transport
from holdfast.workers.checkpoint.layout import Bytes
from holdfast.workers.checkpoint.shard_sources import MappedShard, UnreadableCheckpoint
from holdfast.workers.checkpoint.twin_parts import MIN_SHARED_BYTES, WritableBuffer

from . import inspection
from .buffer_thread import BufferThread

_BUFFER_WAIT_S = 1.0
"""A worker that waits longer for a buffer reports phase `save`, so that it does not count as a
hang."""

_LOOK_S = 0.05
"""Seconds between looks of a holding worker whether its generation is over."""

_TRAINS_S = 30.0
"""A worker that begins no collectives has imported what it needs after so long."""


class AgentGone(HoldfastError):
    """The agent has closed the connection: this worker has lost its node."""


class AgentChannel:
    """Connection of one worker to its agent; the BufferSource of its Stager."""

    def __init__(
        self,
        connection: socket.socket,
        hold_s: float = limits.HOLD_S,
        inspection_socket: socket.socket | None = None,
        stage_every_steps: int = 0,
        has_twins: bool = False,
    ) -> None:
        """`hold_s`: longest wait for a planned stop. `stage_every_steps`: until the agent says
        otherwise. `has_twins`: the agent says for each step what this worker stages of it."""
        self._connection, self._hold_s = connection, hold_s
        self._inspection = inspection_socket
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._memory: dict[int, mmap.mmap] = {}
        self._unmapped: dict[int, tuple[int, int]] = {}
        self._has_twins, self._shares = has_twins, False
        self._free: deque[tuple[int, int, int]] = deque()
        """(buffer, part, parts)."""
        self._answers: deque[tuple[worker_protocol.Shard, int] | worker_protocol.NoShard] = deque()
        self._ended = threading.Event()
        self._requested_steps: dict[int, bool] = {}
        self._every = stage_every_steps
        self._intervals = deque[worker_protocol.SetStagingInterval]()
        self._receiving = threading.Lock()
        self._buffer_thread: BufferThread | None = None
        self._no_buffer = ""
        """Reason why the agent gives no buffer."""
        self._pulsing = self._of_script = False
        self._wants_notice = False
        self._notice: tuple[worker_protocol.StopNotice, float] | None = None
        self._imported: Callable[[], tuple[str, ...]] | None = None
        self.halt: Callable[[], None] = lambda: None
        """Called in the pulse thread when the generation is over and this process may be kept."""
        self.when_training: Callable[[], None] | None = None
        """Called once, when the script trains."""
        self.is_over: Callable[[], bool] = lambda: False
        """True if `halt` was called."""
        self.phase: WorkerPhase = "start"

    # -- reports ------------------------------------------------------------------------------
    def send(self, message: worker_protocol.FromWorker) -> None:
        """Send one message. Raises AgentGone."""
        try:
            worker_transport.send(self._connection, message)
        except OSError as error:
            raise AgentGone(f"the node's agent is gone ({error.strerror})") from None

    def enter(self, phase: WorkerPhase) -> None:
        self.phase = phase
        self.send(worker_protocol.PhaseChanged(phase=phase))

    def begin(self, after_step: int, phase: WorkerPhase) -> None:
        """This process begins to train after that step, and will say where its steps end."""
        self.phase = phase
        self.reports_steps()
        self.send(worker_protocol.PhaseChanged(phase=phase, began_after=after_step))

    def start_pulse(
        self, imported: Callable[[], tuple[str, ...]] | None = None, *, of_script: bool = False
    ) -> None:
        """Start the thread that sends a Pulse every limits.PULSE_INTERVAL_S, unless it runs.
        `imported`: the modules to report once the worker trains."""
        if self._pulsing:
            return
        self._pulsing, self._imported, self._of_script = True, imported, of_script
        threading.Thread(target=self._send_pulses, name="holdfast-pulse", daemon=True).start()

    def stop_pulse(self) -> None:
        self._ended.set()

    def _send_pulses(self) -> None:
        began_s = time.monotonic()
        try:
            while not self._ended.is_set():
                count = inspection.num_collectives()
                with contextlib.suppress(MemoryError):  # the training thread reports it
                    self.send(worker_protocol.Pulse(collectives=count))
                wait_s = limits.PULSE_INTERVAL_S
                if count >= limits.BEGUN_COLLECTIVES or time.monotonic() - began_s > _TRAINS_S:
                    self.trains()
                elif self._of_script:
                    wait_s = limits.FIRST_PULSES_S
                if self._inspection is None:
                    self._ended.wait(wait_s)
                elif select.select([self._inspection], [], [], wait_s)[0]:
                    self._inspect(self._inspection)
        except AgentGone:
            return  # the training thread reports the closed socket

    def trains(self) -> None:
        """The script trains."""
        if self.when_training is not None:
            act, self.when_training = self.when_training, None
            act()
        if self._imported is not None:
            modules, self._imported = self._imported(), None
            self.send(worker_protocol.ImportsReported(modules=modules))

    def _inspect(self, asked: socket.socket) -> None:
        """Report why the main thread makes no progress."""
        try:
            request, _fds = packets.receive(asked, 0)
        except OSError:  # this process is about to end
            request = b""
        if request == worker_protocol.HALT:
            self.halt()
        elif request:
            self.send(worker_protocol.StackReport(text=inspection.stacks()))
            self.send(worker_protocol.CollectivesReport(groups=inspection.collectives()))
        else:
            self._inspection = None  # the agent has ended

    @property
    def prepares_buffers(self) -> bool:
        """A thread of this process does, to its end."""
        return self._buffer_thread is not None

    def next_seat(self, halted: worker_protocol.Halted) -> worker_transport.Attached:
        """Wait for a seat in the next generation, and take it; what was sent to this one is
        dropped. Raises AgentGone."""
        assert worker_transport.attached is not None and not self.prepares_buffers
        before, assign = worker_transport.attached, None
        assert before.take_seat is not None
        self.send(halted)
        while not isinstance(assign, worker_protocol.Assign):
            assign, fd = worker_transport.receive(self._connection)
            if assign is None:
                raise AgentGone("the node's agent is gone (it closed the connection)")
            if fd is not None and not isinstance(assign, worker_protocol.Assign):
                os.close(fd)
        before.take_seat(assign, fd)
        attached = worker_transport.attached = dataclasses.replace(before, assign=assign)
        _of_process[:] = [(attached, self)]
        for unused, _ in self._unmapped.values():
            os.close(unused)
        for held in (self._memory, self._unmapped, self._requested_steps):
            held.clear()
        for queue in (self._free, self._answers, self._intervals):
            queue.clear()
        self._every, self._has_twins = assign.stage_every_steps, assign.twins > 1
        self._no_buffer, self._notice, self._wants_notice = "", None, False
        return attached

    def reports_steps(self) -> None:
        """Start the pulse of a script in the user's Python; other workers have one."""
        if self._inspection is not None:
            self.start_pulse()

    # -- staging (checkpoint.stage.BufferSource) ----------------------------------------------
    def prepare_with(self, prepare: Callable[[Bytes], None]) -> None:
        self._buffer_thread = BufferThread(
            prepare, self._prepared, self._receive_one, self._connection.fileno()
        )
        self._poll.register(self._buffer_thread.done, select.POLLIN)

    def _prepared(self, buffer: int, memory: mmap.mmap) -> None:
        self._memory[buffer] = memory
        if not self._shares:
            self._free.append((buffer, 0, 1))

    def request_buffers(self, num_bytes: int) -> None:
        if self._buffer_thread is not None:
            self._buffer_thread.expect(limits.STAGING_BUFFERS)
        shares = self._shares = self._has_twins and num_bytes >= MIN_SHARED_BYTES
        for _ in range(1 if shares else limits.STAGING_BUFFERS):
            self.send(worker_protocol.BufferRequest(num_bytes=num_bytes, shared=shares))

    def take_buffer(self, step: int, num_bytes: int, layout: int) -> WritableBuffer:
        if self._shares:
            request = worker_protocol.BufferRequest(
                num_bytes=num_bytes, shared=True, step=step, layout=layout
            )
            self.send(request)
        while self._receive(timeout_s=0):
            pass
        if not self._free and not self._shares:
            self.send(worker_protocol.BufferWanted())
        if not self._wait_for_buffer(time.monotonic() + _BUFFER_WAIT_S):
            phase = self.phase
            self.enter("save")
            self._wait_for_buffer(None)
            self.enter(phase)
        buffer, part, parts = self._free.popleft()
        if buffer in self._unmapped:  # mapped on use: a first step needs one buffer, not three
            fd, num_bytes = self._unmapped.pop(buffer)
            # A twin writes a part of the pages only.
            populate = getattr(mmap, "MAP_POPULATE", 0) if parts == 1 else 0
            self._memory[buffer] = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | populate)
            os.close(fd)
        return WritableBuffer(buffer, self._memory[buffer], part, parts)

    def _wait_for_buffer(self, until: float | None) -> bool:
        """Wait for a buffer that may be written and is prepared; False if none came in time."""
        thread = self._buffer_thread
        while not self._free or (thread is not None and self._free[0][0] not in self._memory):
            if self._no_buffer:  # the buffer thread may have received it
                raise UserError(self._no_buffer)
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self._receive(left_s)
        return True

    def staged(self, buffer: int, step: int, num_bytes: int, sample: int = 0) -> None:
        report = {"buffer": buffer, "step": step, "num_bytes": num_bytes, "sample": sample}
        self.send(worker_protocol.Staged(**report))

    def put_back(self, buffer: int) -> None:
        if self._shares:
            self.send(worker_protocol.BufferReturned(buffer=buffer))
        else:
            self._free.appendleft((buffer, 0, 1))

    def stage_every(self, step: int) -> int:
        """Every how many steps are staged at this step, as the agent says; 0: it says nothing."""
        while self._receive(timeout_s=0):
            pass
        while self._intervals and self._intervals[0].from_step <= step:
            self._every = self._intervals.popleft().every_steps
        return self._every

    def stage_requested(self, step: int) -> bool | None:
        """True to hold after this step; None: the agent has not requested to stage it."""
        while self._receive(timeout_s=0):
            pass
        hold = self._requested_steps.get(step)
        self._requested_steps = {
            at: waits for at, waits in self._requested_steps.items() if at > step
        }
        return hold

    def stop_notice(self) -> tuple[worker_protocol.StopNotice, float] | None:
        """The notice of a planned stop, and when it came (time.monotonic); asked for by the first
        call."""
        if not self._wants_notice:
            self._wants_notice = True
            self.send(worker_protocol.StopNoticeWanted())
        while self._receive(timeout_s=0):
            pass
        return self._notice

    def hold(self) -> None:
        """Wait for the planned stop: steps trained until then would be lost. At most HOLD_S,
        because the stop may have been cancelled, or the controller may be down."""
        phase, until = self.phase, time.monotonic() + self._hold_s
        self.enter("save")
        while (left_s := until - time.monotonic()) > 0 and not self.is_over():
            self._receive(timeout_s=min(left_s, _LOOK_S))
        self.enter(phase)

    # -- restoring ----------------------------------------------------------------------------
    def fetch(self, shard: int) -> MappedShard:
        """A shard of the membership's Restore. Raises UnreadableCheckpoint if no node has it."""
        self.send(worker_protocol.FetchShard(shard=shard))
        while not self._answers:
            self._receive(timeout_s=None)
        answer = self._answers.popleft()
        if isinstance(answer, worker_protocol.NoShard):
            raise UnreadableCheckpoint(f"shard {shard} is in no memory: {answer.detail}")
        message, fd = answer
        return MappedShard(fd, message.num_bytes, f"memory, shard {message.shard}")

    # -- receiving ----------------------------------------------------------------------------
    def _receive(self, timeout_s: float | None) -> bool:
        """Handle one message; False if none came in time. Raises AgentGone."""
        if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            return False
        if self._buffer_thread is not None:
            self._buffer_thread.read_done()
        self._receive_one()
        return True

    def _receive_one(self) -> None:
        """Handle one message. With a buffer thread the other thread may have done that already."""
        with self._receiving:
            if self._buffer_thread is not None:
                readable, _, _ = select.select([self._connection], [], [], 0)
                if not readable:
                    return
            try:
                message, fd = worker_transport.receive(self._connection)
            except ConnectionResetError:  # it ended with unread messages of ours
                message, fd = None, None
            self._handle(message, fd)

    def _handle(
        self, message: worker_protocol.FromWorker | worker_protocol.ToWorker | None, fd: int | None
    ) -> None:
        match message:
            case None:
                raise AgentGone("the node's agent is gone (it closed the connection)")
            case worker_protocol.StageAt():
                self._requested_steps[message.step] = message.hold
            case worker_protocol.SetStagingInterval():
                self._intervals.append(message)
            case worker_protocol.StopNotice():
                self._notice = (message, time.monotonic())
            case worker_protocol.Buffer():
                assert fd is not None
                if self._buffer_thread is not None:
                    self._buffer_thread.put(message.buffer, fd, message.num_bytes)
                else:
                    self._unmapped[message.buffer] = (fd, message.num_bytes)
                if message.parts and (self._shares or self._buffer_thread is None):
                    self._free.append((message.buffer, message.part, message.parts))
            case worker_protocol.BufferFree():
                self._free.append((message.buffer, message.part, message.parts))
            case worker_protocol.NoBuffer():
                self._no_buffer = message.detail
            case worker_protocol.Shard():
                assert fd is not None
                self._answers.append((message, fd))
            case worker_protocol.NoShard():
                self._answers.append(message)
            case _:
                raise AssertionError(f"the agent sent {type(message).__name__}")


_of_process: list[tuple[worker_transport.Attached, AgentChannel]] = []


def of_process() -> AgentChannel | None:
    """The channel of this worker, which the session and `report` share; None outside Holdfast."""
    attached = worker_transport.attached
    if attached is None:
        return None
    if not _of_process or _of_process[0][0] is not attached:
        channel = AgentChannel(
            attached.link,
            inspection_socket=attached.inspection,
            stage_every_steps=attached.assign.stage_every_steps,
            has_twins=attached.assign.twins > 1,
        )
        _of_process[:] = [(attached, channel)]
    return _of_process[0][1]

"""Messages between the agent and the workers of a node. Types only; worker_transport sends them.

A worker's life: the agent sends Assign (at the fork, or later to a standby). The worker sends
PhaseChanged and Progress as it trains, and Pulse from a thread. To stage, it requests buffers
(BufferRequest, answered with Buffer and a descriptor), writes one, sends Staged, and may write that
buffer again after BufferFree. While an upload or a push keeps all its buffers, the agent sends one
more Buffer without a request. A worker that has to wait sends BufferWanted; a node short of memory
then gives up its older step. Ranks of a node with one shard index (`Assign.twins` of them) request
the buffer of each step instead; all get the same one, and each writes a part of it. The spec says
which steps are staged; StageAt requests others. To
restore, the worker sends FetchShard and gets Shard and a descriptor (read-only), or NoShard. It
ends with Failed, or with Leaving (after Finished if it uses the session), and exits.

A script that keeps its own checkpoints may send StopNoticeWanted, and gets StopNotice in a planned
stop, while it has time to save.

A byte on a second socket, which the pulse thread reads, asks for StackReport and CollectivesReport.
Another byte halts a worker that has sent KeepReported without an objection: its generation is over.
It answers with Halted, sends nothing but pulses, and gets Assign again for a seat in the next one.
The same byte halts a worker that has sent RunsAgain; in its next seat it runs the script again.
"""

from __future__ import annotations

import msgspec

from holdfast.orchestrator.protocol.facts import (
    GroupProgress,
    Membership,
    StepReport,
    StepSource,
    WorkerPhase,
    WorkerSeat,
)

ASK_STACK = b"?"
"""Byte that asks for a stack on the second socket; no message in msgpack is this byte."""
HALT = b"!"
"""The same."""


class WorkerMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True
):
    """Base of all messages."""


# -- worker -> agent --------------------------------------------------------------------------
class PhaseChanged(WorkerMessage, frozen=True, kw_only=True, tag="phase"):
    """The worker entered a phase. Counts as progress."""

    phase: WorkerPhase
    began_after: int | None = None
    """The worker begins to train after this step, and will report those that follow; None: it does
    not say."""


class ProgressTick(WorkerMessage, frozen=True, kw_only=True, tag="tick"):
    """Progress within a step or phase, such as a micro-batch."""


class Progress(
    StepReport, frozen=True, kw_only=True, tag_field="type", tag="progress", omit_defaults=True
):
    """A step is finished on this rank."""

    step: int
    work_s: float = 0.0
    """Median over the last steps of the training thread's CPU time; 0: not known."""
    probe_s: float = 0.0
    """Median over the last probes of the GPU's time for the same work; 0: not known."""


class Reported(
    StepReport, frozen=True, kw_only=True, tag_field="type", tag="reported", omit_defaults=True
):
    """A script that keeps its own checkpoints has finished a step. The agent makes it of what a
    program posts."""

    step: int
    """-1: it begins to train."""
    began_after: int | None = None
    """The last step before that, if it begins; None: it does not tell."""
    source: StepSource = "script"
    """Posted, by HTTP: one rank speaks for all, every few seconds."""
    finished: bool = False
    """A post says that the training is complete, and not after which step."""


class Pulse(WorkerMessage, frozen=True, kw_only=True, tag="pulse"):
    """The Python interpreter of the worker runs."""

    collectives: int = 0
    """Number of collectives that this process has begun, in all process groups."""


class BufferRequest(WorkerMessage, frozen=True, kw_only=True, tag="buffer-request"):
    num_bytes: int
    shared: bool = False
    """True for a worker with twins: it will write a part of each buffer."""
    step: int = -1
    """Step that a sharing worker will stage; -1: it asks for the descriptors of the buffers that it
    will need."""
    layout: int = 0
    """Equal for files in which all data have the same position."""


class BufferWanted(WorkerMessage, frozen=True, kw_only=True, tag="buffer-wanted"):
    """The worker waits for a buffer: one that keeps an older step may be given to it."""


class Staged(WorkerMessage, frozen=True, kw_only=True, tag="staged"):
    """Buffer `buffer` now holds this worker's part of the state of `step`. All parts together are a
    whole safetensors file of `num_bytes` (the memfd may be longer); of several parts, the agent
    writes the checksum of the header."""

    buffer: int
    step: int
    num_bytes: int
    sample: int = 0
    """Checksum, by a worker with twins, of a few bytes that must be the same on all of them."""


class BufferReturned(WorkerMessage, frozen=True, kw_only=True, tag="buffer-returned"):
    """A worker with twins did not stage its part of this buffer. It may ask for it again."""

    buffer: int


class ImportsReported(WorkerMessage, frozen=True, kw_only=True, tag="imported"):
    """The installed modules that a script has imported until it trained, in their order."""

    modules: tuple[str, ...]


class StandbyImported(WorkerMessage, frozen=True, kw_only=True, tag="standby-imported"):
    """A standby has imported what the script imports, and waits for its rank."""


class Noted(WorkerMessage, frozen=True, kw_only=True, tag="noted"):
    """A sentence for the job's events."""

    text: str


class Leaving(WorkerMessage, frozen=True, kw_only=True, tag="leaving"):
    """The script has run to its end; threads and exit functions are left."""

    waits_for: str = ""
    """Reason why the process has not ended since its first Leaving; empty in that one."""


class CheckpointWritten(WorkerMessage, frozen=True, kw_only=True, tag="checkpoint-written"):
    """A script is about to write a checkpoint of its own: a file, or a folder."""

    path: str
    unread: bool = False
    """True if the restarted script has opened none of the job's checkpoints."""
    waits: bool = False
    """True if the rank would overwrite one and waits to be ended."""


class CheckpointOpened(WorkerMessage, frozen=True, kw_only=True, tag="checkpoint-opened"):
    """Rank 0 of a script that was started again reads a checkpoint of the job."""

    path: str


class FetchShard(WorkerMessage, frozen=True, kw_only=True, tag="fetch-shard"):
    """Request a shard of the membership's Restore."""

    shard: int


class StopNoticeWanted(WorkerMessage, frozen=True, kw_only=True, tag="stop-notice-wanted"):
    """The worker gets StopNotice in place of SIGTERM in a planned stop."""


class StackReport(WorkerMessage, frozen=True, kw_only=True, tag="stack"):
    """Stacks, the main thread's first, as the pulse thread sees them; asked for by a byte on the
    inspection socket. CollectivesReport follows."""

    text: str


class CollectivesReport(WorkerMessage, frozen=True, kw_only=True, tag="collectives"):
    """The newest collective of each process group. A message of its own: the flight recorder may
    not answer."""

    groups: tuple[GroupProgress, ...] = ()


class KeepReported(WorkerMessage, frozen=True, kw_only=True, tag="keep"):
    """The worker is in a loop of attempts, so its process can be kept when a peer dies."""

    why_not: str
    """Reason why the process cannot be kept; empty: it can."""


class RunsAgain(WorkerMessage, frozen=True, kw_only=True, tag="runs-again"):
    """The script of this worker may run again in its process, whatever it does."""


class Halted(WorkerMessage, frozen=True, kw_only=True, tag="halted"):
    """The answer to HALT: the attempt or the script has ended, and the worker waits for its next
    Assign."""

    step: int
    """The last one that it has finished."""
    fixed_size: str = ""
    """Reason why the script cannot go on in a world of another size; empty: it can."""
    runs_again: bool = False
    """True: the process has nothing of the script any more."""


class Failed(WorkerMessage, frozen=True, kw_only=True, tag="failed"):
    """The script has raised. Its hooks, threads and exit functions may still run."""

    error_type: str
    message: str
    traceback: str
    secondary: bool = False
    out_of_memory: bool = False
    at_ns: int = 0
    """Wall clock, when the agent received it."""


class Finished(WorkerMessage, frozen=True, kw_only=True, tag="finished"):
    """The training loop is complete; the agent persists the last staged step."""

    step: int


# -- agent -> worker --------------------------------------------------------------------------
class Assign(WorkerMessage, frozen=True, kw_only=True, tag="assign"):
    """The worker's seat. `environment` is complete: the variables of torchrun and of the fabric."""

    membership: Membership
    seat: WorkerSeat
    node_rank: int
    environment: dict[str, str]
    checkpoint_path: str = ""
    node: str = ""
    spec_directory: str = ""
    stage_every_steps: int = 0
    """Stage every Nth step; 0: as the spec says."""
    twins: int = 1
    """Ranks of this node with the shard index of this one, itself included."""
    log_file: str = ""
    """File for stdout and stderr. Empty: the file descriptor that comes with this message."""


class StageAt(WorkerMessage, frozen=True, kw_only=True, tag="stage-at"):
    """Stage this step regardless of the checkpoint interval. A worker past it trains on."""

    step: int
    hold: bool = False
    """True: wait up to limits.HOLD_S afterwards for the stop that follows."""


class SetStagingInterval(WorkerMessage, frozen=True, kw_only=True, tag="stage-every"):
    """Stage every Nth step from `from_step` on."""

    every_steps: int
    from_step: int


class StopNotice(WorkerMessage, frozen=True, kw_only=True, tag="stop-notice"):
    """A planned stop: save after `after_step`, the same on all ranks, and end within `grace_s`."""

    after_step: int
    grace_s: float


class Buffer(WorkerMessage, frozen=True, kw_only=True, tag="buffer"):
    """Comes with one file descriptor. `part` of `parts`: what this worker writes; 0 parts: nothing
    yet."""

    buffer: int
    num_bytes: int
    part: int = 0
    parts: int = 1


class BufferFree(WorkerMessage, frozen=True, kw_only=True, tag="buffer-free"):
    """The worker may write this buffer again: `part` of `parts`."""

    buffer: int
    part: int = 0
    parts: int = 1


class NoBuffer(WorkerMessage, frozen=True, kw_only=True, tag="no-buffer"):
    """The node has no memory for even one buffer."""

    detail: str


class Shard(WorkerMessage, frozen=True, kw_only=True, tag="shard"):
    """Comes with one file descriptor."""

    shard: int
    num_bytes: int


class NoShard(WorkerMessage, frozen=True, kw_only=True, tag="no-shard"):
    shard: int
    detail: str


FromWorker = (
    PhaseChanged
    | ProgressTick
    | Progress
    | Reported
    | Pulse
    | BufferRequest
    | BufferWanted
    | BufferReturned
    | Staged
    | ImportsReported
    | StandbyImported
    | Noted
    | Leaving
    | CheckpointWritten
    | CheckpointOpened
    | FetchShard
    | StopNoticeWanted
    | StackReport
    | CollectivesReport
    | KeepReported
    | RunsAgain
    | Halted
    | Failed
    | Finished
)
ToWorker = (
    Assign | StageAt | SetStagingInterval | StopNotice | Buffer | BufferFree | NoBuffer | Shard
    | NoShard
)  # fmt: skip

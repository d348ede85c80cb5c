"""Messages between agents, controller and command line: msgpack structs, and their framing.

A frame is a 4-byte big-endian length and a msgpack map with a `type`. An agent connects and sends
Hello; the controller answers Welcome or Refused. A message of another generation than the
receiver's is rejected or ignored, never obeyed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .. import limits
from ..errors import UserError
from .facts import (
    Exit,
    Membership,
    NodeFacts,
    ShardFile,
    Stack,
    StagedShard,
    WorkerBeat,
    WorkerSeat,
)
from .framing import UNDECODABLE, frame
from .framing import BadFrame as BadFrame
from .framing import frame_length as frame_length
from .host_memory import HostMemory
from .rank_stacks import RankStacks

Endpoint = tuple[str, int]
"""Address of a controller: (host name or IP address, port)."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all messages."""


# -- agent -> controller ----------------------------------------------------------------------
class Greeting(Message, frozen=True, kw_only=True, omit_defaults=False):
    """The first message of a connection. All its fields are sent: a receiver of another version has
    other defaults."""

    version: int = limits.PROTOCOL_VERSION
    release: str = limits.RELEASE


class NodeJoined(Message, frozen=True, kw_only=True, tag="node-joined"):
    """An agent has connected: for the first time, again, or to a new controller."""

    facts: NodeFacts
    generation: int = 0
    """Generation of the workers that run on the node; 0: none."""
    ranks: tuple[int, ...] = ()
    """Ranks that run on the node."""
    staged: tuple[StagedShard, ...] = ()
    offered_port: int = 0
    """A free port of the node, for MASTER_PORT of the next generation."""


class Hello(Greeting, frozen=True, kw_only=True, tag="hello"):
    """First message of an agent, after every connect and reconnect."""

    token: str
    job: str
    node: str
    joined: NodeJoined


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    generation: int
    workers: tuple[WorkerBeat, ...] = ()
    staged_step: int = -1
    """Newest step that all workers of the node have staged."""
    copied_step: int = -1
    """Newest step of which all buddies hold a copy, as the controller has confirmed it."""
    stage_every_steps: int = 0
    """The workers stage every Nth step, from `stage_from_step` on; 0: as the spec says."""
    stage_from_step: int = 0
    cpu_pressure: float = 0.0
    """Share of the time that runnable threads of the workers waited for a CPU; 0: unknown."""


class Launched(Message, frozen=True, kw_only=True, tag="launched"):
    """Result of LaunchWorkers."""

    action_id: int
    generation: int
    ok: bool
    detail: str = ""


class WorkerExited(Message, frozen=True, kw_only=True, tag="worker-exited"):
    generation: int
    exit: Exit


class GroupStopped(Message, frozen=True, kw_only=True, tag="group-stopped"):
    """Result of StopWorkers: no worker of that generation runs on the node any more. `staged` is
    what the memory tier still holds."""

    action_id: int
    generation: int
    exits: tuple[Exit, ...] = ()
    staged: tuple[StagedShard, ...] = ()
    stacks: tuple[Stack, ...] = ()
    offered_port: int = 0
    kept: tuple[int, ...] = ()
    """Ranks whose processes wait for a seat in the next generation."""
    again: tuple[int, ...] = ()
    """Ranks whose processes run the script again in the next generation."""
    fixed_size: str = ""
    """Reason why they cannot have one in a world of another size; empty: they can."""
    why_not: str = ""
    """Reason that a worker of the node gave why its process cannot be kept."""


class GroupInspected(Message, frozen=True, kw_only=True, tag="group-inspected"):
    """Result of Inspect. Texts only of ranks that do not wait for their peers."""

    generation: int
    stacks: tuple[Stack, ...] = ()


class ShardStaged(Message, frozen=True, kw_only=True, tag="staged"):
    """Result of Stage."""

    action_id: int
    ok: bool
    detail: str = ""


class StepCopied(Message, frozen=True, kw_only=True, tag="step-copied"):
    """Result of CopyStep: all shards that the node stages of `step` are in its buddy's memory. Sent
    again after every Welcome."""

    generation: int
    wanted: int
    """The step of the order."""
    step: int
    """The first staged step at or after `wanted`."""
    staged_step: int
    """Newest step that a worker of the node has staged."""
    seconds: float = 0.0
    """The longest push of a shard."""
    detail: str = ""
    """Reason why the version is not copied; empty: it is."""
    missed: bool = False
    """The order came too late: the step was not in memory any more."""


class NodeMemoryPlanned(Message, frozen=True, kw_only=True, tag="node-memory-planned"):
    """Staged state that the node's memory can hold; sent for new buffers and when it changes."""

    generation: int
    memory: HostMemory


class StandbysReported(Message, frozen=True, kw_only=True, tag="standbys-reported"):
    """Sent when the node's standbys have imported what the script imports, or there is nothing to
    import: also after every Welcome, and when it changes."""

    ready: bool


class ShardPersisted(Message, frozen=True, kw_only=True, tag="shard-persisted"):
    """A shard is durable in storage; it counts once the controller commits the manifest."""

    generation: int
    shard: ShardFile
    seconds: float = 0.0


class PersistFailed(Message, frozen=True, kw_only=True, tag="persist-failed"):
    generation: int
    step: int
    shard: int
    detail: str
    tried: bool = True
    """False: nothing was written because there was nothing to write, or no time for it."""


class PreemptionNoticed(Message, frozen=True, kw_only=True, tag="preemption-noticed"):
    """The node will be preempted, or was asked to end (SIGTERM); its workers still run, until it
    receives Shutdown. The agent sends this again after every Welcome."""

    detail: str = ""
    grace_s: float = 0.0
    """Seconds that the node stays at least; 0: unknown."""


class AgentEvent(Message, frozen=True, kw_only=True, tag="agent-event"):
    """A line for the log on which no decision depends, such as a restart of the forkserver."""

    text: str


class NodeRemarked(Message, frozen=True, kw_only=True, tag="node-remarked"):
    """A remark for the job's events, such as a checkpoint that was renamed. No decision depends on
    it."""

    text: str
    shown: bool = False
    """True if the text is also the job's reason while it runs."""


class OwnCheckpointSeen(Message, frozen=True, kw_only=True, tag="own-checkpoint-seen"):
    """A rank writes a checkpoint of the script's own."""

    generation: int
    path: str
    times: int = 1
    """Number of writes by this generation, as this node's ranks are known to."""
    unread: bool = False
    """Rank 0 was started again and has opened no checkpoint of the job before."""
    waits: bool = False
    """True if the rank waits for its end before it overwrites a checkpoint: nothing is written."""


class OwnCheckpointRead(Message, frozen=True, kw_only=True, tag="own-checkpoint-read"):
    """Rank 0 of a script that was started again reads a checkpoint of the job."""

    generation: int
    path: str


class StacksShown(Message, frozen=True, kw_only=True, tag="stacks-shown"):
    """Answer to ShowStacks; ranks that are not in it have ended."""

    question: int
    stacks: tuple[RankStacks, ...] = ()


class ProfileRecorded(Message, frozen=True, kw_only=True, tag="profile-recorded"):
    """Answer to RecordProfile."""

    question: int
    content: bytes = b""
    """The file, compressed with zlib."""
    problem: str = ""
    """Reason why there is no profile; empty: there is one."""


class FetchCode(Message, frozen=True, kw_only=True, tag="fetch-code"):
    """Send a part of a code archive. Parts are requested one after the other, so that no node has
    more than one under way; a request without an answer is repeated."""

    code: str
    part: int


class ImportsLearned(Message, frozen=True, kw_only=True, tag="imports"):
    """Modules that rank 0 of a script had imported when it trained, for standbys of nodes that join
    later. The agent of rank 0 sends them, again after every Welcome. No decision depends on them.
    """

    modules: tuple[str, ...]


# -- controller -> agent ----------------------------------------------------------------------
class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The job as the agent needs it; `spec` is the TrainingJob document."""

    spec: dict[str, Any]
    spec_directory: str
    """Directory of the spec file, to which workingDirectory is relative."""
    checkpoint_path: str
    log_directory: str
    heartbeat_interval_s: float
    controller_absence_s: float | None = limits.CONTROLLER_ABSENCE_S
    """Seconds without a controller after which the agent ends its node; None: never."""
    submitted_ns: int = 0
    """Wall clock of the job's submission; 0: not known."""
    job_id: str = ""
    imports: tuple[str, ...] = ()
    """The same as in ImportsLearned; empty: not known."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The controller closes the connection. `final`: the agent must not reconnect."""

    detail: str
    final: bool


class LaunchWorkers(Message, frozen=True, kw_only=True, tag="launch"):
    """Fork these workers, unless they run already; then the agent answers Launched."""

    action_id: int
    membership: Membership
    node_rank: int
    seats: tuple[WorkerSeat, ...]
    buddy: str = ""
    """Node that gets a copy of the shards that this node stages; empty: none needed."""
    buddy_address: str = ""
    buddy_port: int = 0
    persist_every_steps: int = 0
    """Write every Nth step to storage; 0: only when Persist is received."""
    stage_every_steps: int = 0
    """Workers stage every Nth step; 0: as the spec says."""
    code: str = ""
    """Archive in whose files the workers run (FetchCode); empty: in those that the node has."""
    nodes_on_machine: int = 1
    """Nodes of this generation that share the machine's memory, this one included."""


class StopWorkers(Message, frozen=True, kw_only=True, tag="stop"):
    """Stop all workers of a generation: SIGTERM, then SIGKILL after grace_s (0: at once)."""

    action_id: int
    generation: int
    grace_s: float = 0.0
    stacks: bool = False
    """Collect the stacks of every worker first."""
    save_grace_s: float = 0.0
    """Seconds, without grace, to end a declared save, unless it waits for its peers."""
    after_step: int = -1
    """Step after which workers that have asked for notices save, if there is grace; they get no
    SIGTERM; -1: there is no time for it."""
    keep: bool = False
    """True: without grace, workers that leave their step within limits.HALT_S are kept."""


class Inspect(Message, frozen=True, kw_only=True, tag="inspect"):
    """Report what every worker of the generation does. It continues undisturbed."""

    generation: int


class ShowStacks(Message, frozen=True, kw_only=True, tag="show-stacks"):
    """A user asks what these ranks do. They continue undisturbed."""

    question: int
    generation: int
    ranks: tuple[int, ...]


class RecordProfile(Message, frozen=True, kw_only=True, tag="record-profile"):
    """A user asks where a rank spends its time. It continues undisturbed."""

    question: int
    generation: int
    rank: int
    seconds: float
    rate: int
    """Samples per second."""
    format: str
    """flamegraph or speedscope."""
    idle: bool = False
    """Count threads that wait, too."""


class Stage(Message, frozen=True, kw_only=True, tag="stage"):
    """Have all workers stage this step, regardless of their interval."""

    action_id: int
    """0: the controller does not wait for the answer."""
    generation: int
    step: int
    hold: bool = False
    """Wait a moment after the step: StopWorkers follows."""


class StageEvery(Message, frozen=True, kw_only=True, tag="stage-every"):
    """Stage every Nth step from `from_step` on; before it as until now."""

    generation: int
    every_steps: int
    from_step: int


class Persist(Message, frozen=True, kw_only=True, tag="persist"):
    """Write the first step >= `step` that this node has staged or will stage to storage. The first,
    so that all nodes write the same step."""

    action_id: int
    generation: int
    step: int


class CopyStep(Message, frozen=True, kw_only=True, tag="copy-step"):
    """Copy the first step >= `step` that this node has staged or will stage to the buddy, and keep
    it in memory. The first, so that all nodes copy the same step."""

    generation: int
    step: int
    confirmed: int = -1
    """All agents have copied this step: it is kept, older ones need not be. -1: none is confirmed
    by this controller; what was confirmed before is kept."""


class CodePart(Message, frozen=True, kw_only=True, tag="code-part"):
    """Answer to FetchCode."""

    code: str
    part: int
    num_parts: int = 0
    data: bytes = b""
    problem: str = ""
    """Reason why there is no code; empty: there is some."""


class Committed(Message, frozen=True, kw_only=True, tag="committed"):
    """A manifest is durable: staging buffers that were kept for it may be freed."""

    generation: int
    step: int


class Chaos(Message, frozen=True, kw_only=True, tag="chaos"):
    """Inject a fault that a user has requested."""

    kind: str
    """kill-worker, hang-worker or kill-node."""
    rank: int = -1


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """Stop the workers and the agent, and remove their files."""

    detail: str


# -- command line <-> controller --------------------------------------------------------------
class Request(Greeting, frozen=True, kw_only=True, tag="request"):
    """A request of the command line, the first message of its connection."""

    token: str
    job: str = ""
    """Empty: the only job of this controller."""
    verb: str
    """See runtime.control_api."""
    arguments: dict[str, Any] = {}


class Reply(Message, frozen=True, kw_only=True, tag="reply"):
    ok: bool
    detail: str = ""
    body: dict[str, Any] = {}


Report = (
    Heartbeat | WorkerExited | GroupStopped | StepCopied | NodeMemoryPlanned | ShardPersisted
    | PersistFailed | PreemptionNoticed | NodeRemarked | GroupInspected | StandbysReported
    | OwnCheckpointSeen | OwnCheckpointRead
)  # fmt: skip
Fact = NodeJoined | Report
"""Taken in by the core as they are (core.events.FromNode). A node joins by its Hello alone, which
the controller may reject."""
FromAgent = Hello | Report | Launched | ShardStaged | AgentEvent | ImportsLearned
ToAgent = (
    Welcome | Refused | LaunchWorkers | StopWorkers | Stage | StageEvery | Persist | CopyStep
    | Committed | Chaos | Shutdown | Inspect
)  # fmt: skip

Question = ShowStacks | RecordProfile
"""Answered by the agent's process, not by its machine: no decision depends on it."""
QuestionAnswer = StacksShown | ProfileRecorded
"""Never an event."""

_ENCODER = msgspec.msgpack.Encoder()
AnyMessage = (
    FromAgent | ToAgent | Question | QuestionAnswer | FetchCode | CodePart | Request | Reply
)
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """A whole frame, with its length."""
    body = _ENCODER.encode(message)
    assert len(body) <= limits.MAX_FRAME_BYTES, f"{type(message).__name__}: {len(body)} bytes"
    return frame(body)


def decode(body: bytes) -> AnyMessage:
    """The message in a frame's body. Raises BadFrame."""
    try:
        return _DECODER.decode(body)
    except UNDECODABLE as error:
        raise BadFrame(str(error)) from None


def parse_endpoints(text: str, field: str = "--endpoint") -> tuple[Endpoint, ...]:
    """`HOST:PORT[,HOST:PORT...]`, an IPv6 address in brackets. Raises UserError."""
    endpoints = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        bracketed = host.startswith("[") and host.endswith("]")
        good = colon and bare and port.isdecimal() and 0 < int(port) < 65536
        if not good or (":" in bare and not bracketed):
            expected = "HOST:PORT[,HOST:PORT...], an IPv6 address in brackets"
            raise UserError.of(field, part.strip() or "nothing", expected)
        endpoints.append((bare, int(port)))
    return tuple(endpoints)

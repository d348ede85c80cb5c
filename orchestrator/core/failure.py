"""Failure attribution: the facts of one interruption give its class, culprit and evidence, by a
first-match table. Pure functions over plain values; recovery.py decides what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..protocol.facts import CRASH_SIGNALS, Exit, Stack, SuspectBasis, steps_done
from .hang.suspects import culprit
from .state import FailureClass, Place

SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM", 24: "SIGXCPU", 31: "SIGSYS",
}  # fmt: skip
SIGABRT = 6
ABORTED_TOGETHER_S = 10.0
"""SIGABRT of several nodes within this time: the watchdogs of a job end their processes within a
second of each other, and the nodes' clocks differ."""
TAKEN_AWAY_SIGNALS = (9, 15)
# What a worker sees when a peer is gone: secondary failures, even if it did not mark them so.
NETWORK_TYPES = (
    "DistNetworkError", "DistStoreError", "DistBackendError", "ConnectionResetError",
    "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError",
)  # fmt: skip
NETWORK_WORDS = (
    "connection reset by peer", "connection closed by peer", "connection refused", "broken pipe",
    "socket timeout", "failed to recv", "timed out waiting for clients", "remote process exited",
)  # fmt: skip
DEVICE_WORDS = (
    "cuda error", "uncorrectable ecc", "nvlink", "unspecified launch failure", "cudnn_status",
    "device-side", "xid", "unhandled system error", "fell off the bus",
)  # fmt: skip
MISSING_DEVICE_TYPES = ("DeviceMissing",)
"""The node lacks a GPU that it should have, and a restart does not bring it back."""
DIVERGED = "diverged"
DIVERGED_TYPES = ("ReplicasDiverged",)
"""Replicas of a parameter differ after processes were kept."""
DAMAGED_TYPES = ("DamagedCheckpoint",)
MISSING_TYPES = ("MissingCheckpoint",)
"""The store can be read, and does not have the checkpoint."""
UNREADABLE_TYPES = ("UnreadableCheckpoint",)
SHARDED_OVER_WORLD = "ShardedOverWorld"
HOPELESS_TYPES = ("WrongModel", "WrongOptimizer", "WrongSharding", SHARDED_OVER_WORLD)
"""Errors that even one restart does not change."""


@dataclass(frozen=True, slots=True)
class FailureEvidence:
    """Evidence of one interruption."""

    exits: tuple[tuple[str, Exit], ...] = ()
    """(node, how it ended), in the order of the events."""
    lost: tuple[tuple[str, str, str], ...] = ()
    """(node, cause, detail), in the order of the events."""
    lost_first: bool = False
    hang: tuple[tuple[int, ...], str] | None = None
    """(suspects, the likeliest first; evidence)."""
    hang_basis: SuspectBasis = ""
    stacks: tuple[Stack, ...] = ()
    """Taken before the workers were killed."""
    launch_failure: tuple[str, str] | None = None
    """(node, detail)."""
    refused: str = ""
    """Problem of the checkpoint that this generation started from."""
    journal_behind: str = ""
    """Nodes run a generation that is not in the journal."""
    leaving: tuple[tuple[str, str], ...] = ()
    """(node, reason) of nodes with a preemption notice."""
    node_of: Callable[[int], str] = lambda rank: ""
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    failure_class: FailureClass
    title: str
    evidence: str
    culprit_node: str = ""
    culprit_rank: int | None = None
    exit: Exit | None = None
    damaged: bool = False
    """The state that it started from could not be read."""
    rule: str = ""
    """The name in TABLE."""
    hung_at: str = ""
    """Frame in which the culprit of a hang did nothing, while its peers waited for it."""


def is_secondary(exit: Exit) -> bool:
    """The error is a consequence of the loss of a peer or of the network."""
    if exit.secondary:
        return True
    text = exit.error_message.lower()
    return exit.error_type in NETWORK_TYPES or any(word in text for word in NETWORK_WORDS)


def is_failure(exit: Exit) -> bool:
    """True if the worker ended other than with exit code 0, and Holdfast did not stop it."""
    return not exit.by_us and (exit.signal is not None or exit.code != 0)


def last_frame(traceback: str) -> str:
    """The innermost `File ..., line ...` of a Python traceback."""
    frames = [line.strip() for line in traceback.splitlines() if line.startswith("  File ")]
    return frames[-1] if frames else ""


REPEATS = {"user-exception": 2, "out-of-memory": 2, "native-crash": 2, "hang": 3, "network": 3}
"""Rule -> after how many failures at one place the script is the cause; for a crash of native code,
on how many nodes: one node may be broken. Rules that are missing here judge the machine only."""


def place(failure: Failure, step: int) -> Place | None:
    """Place of a failure; None: not known. `step`: the last one that all ranks finished."""
    exit = failure.exit
    if failure.rule not in REPEATS:
        return None
    if failure.rule == "hang":
        return ("hang", "", failure.hung_at, step) if failure.hung_at else None
    assert exit is not None
    frame = last_frame(exit.traceback)
    if exit.error_type and failure.rule != "network":
        return (exit.error_type, exit.error_message, frame, exit.step)
    # Messages of crashes name addresses, which differ.
    crashed = exit.signal in CRASH_SIGNALS and frame and not is_secondary(exit)
    return (_signal(exit), "", frame, exit.step) if crashed else None


Match = Callable[[FailureEvidence], Failure | None]


def _first(facts: FailureEvidence, wanted: Callable[[Exit], bool]) -> tuple[str, Exit] | None:
    for node, exit in facts.exits:
        if is_failure(exit) and wanted(exit):
            return node, exit
    return None


def _where(exit: Exit, node: str) -> str:
    return f"worker {exit.rank} on {node}"


def when(exit: Exit) -> str:
    """Point of the work at which a worker ended. A script need not report steps."""
    return f"after {steps_done(exit.step)}" if exit.step >= 0 else "before it reported a step"


def _signal(exit: Exit) -> str:
    if exit.signal is None:
        return f"exit code {exit.code}"
    return SIGNALS.get(exit.signal, f"signal {exit.signal}")


def _others(facts: FailureEvidence, exit: Exit) -> str:
    secondary = sum(1 for _n, e in facts.exits if is_failure(e) and is_secondary(e) and e != exit)
    who = f"{secondary} peers" if secondary != 1 else "1 peer"
    return f"; {who} then lost the connection to it" if secondary else ""


def _launch(facts: FailureEvidence) -> Failure | None:
    if facts.launch_failure is None:
        return None
    node, detail = facts.launch_failure
    title = f"{node} could not start its workers"
    return Failure("infrastructure", title, detail or "no detail given", node)


def _journal_behind(facts: FailureEvidence) -> Failure | None:
    if not facts.journal_behind:
        return None
    title = "the last controller could not write its journal to the end"
    return Failure("infrastructure", title, facts.journal_behind)


def _refused(facts: FailureEvidence) -> Failure | None:
    if not facts.refused:
        return None
    title = "the checkpoint to start from is damaged"
    return Failure("infrastructure", title, facts.refused, damaged=True)


def _preempted(facts: FailureEvidence) -> Failure | None:
    for node, cause, detail in facts.lost:
        if cause == "preempted":
            return Failure("preemption", f"{node} was preempted", detail, node)
    announced = dict(facts.leaving)
    for node, exit in facts.exits:
        # The platform kills what runs on a machine that it takes back.
        if node in announced and is_failure(exit) and exit.signal in TAKEN_AWAY_SIGNALS:
            evidence = f"{announced[node]}; worker {exit.rank} got {_signal(exit)} {when(exit)}"
            return Failure("preemption", f"{node} was preempted", evidence, node, exit.rank, exit)
    return None


def _left_early(facts: FailureEvidence) -> Failure | None:
    """Some workers ended with exit code 0 while others continued until they hung or failed."""
    early = [(n, e) for n, e in facts.exits if e.code == 0 and not e.by_us]
    primary = _first(facts, lambda e: not is_secondary(e))
    if not early or primary or facts.lost or len(early) == facts.world_size:
        return None
    node, exit = early[0]
    title = f"{_where(exit, node)} ended with exit code 0 while others continued"
    still = facts.world_size - len(early)
    evidence = f"it left {when(exit)}; {still} of {facts.world_size} workers had not ended"
    return Failure("user", title, evidence, node, exit.rank, exit)


def _hang(facts: FailureEvidence) -> Failure | None:
    if facts.hang is None or _first(facts, lambda e: not is_secondary(e)):
        return None
    suspects, evidence = facts.hang
    rank, why = culprit(suspects, facts.hang_basis, facts.stacks)
    node = facts.node_of(rank) if rank is not None else ""
    title = f"worker {rank} on {node} hung" if rank is not None else "the job made no progress"
    if rank is None:
        evidence += "; no rank differs from its peers, so none is named"
    elif why:
        evidence += f"; {why}"
    idle = next((s for s in facts.stacks if s.rank == rank and s.activity == "nothing"), None)
    hung_at = idle.place if idle is not None else ""
    if hung_at:
        evidence += (
            f"; it is at {hung_at}. If it waits there on purpose, put session.phase() around the "
            "wait or set recovery.hangTimeoutSeconds"
        )
    return Failure("hang", title, evidence, node, rank, hung_at=hung_at)


def _lost(facts: FailureEvidence) -> Failure | None:
    if not facts.lost:
        return None
    node, cause, detail = facts.lost[0]
    more = f" and {len(facts.lost) - 1} more" if len(facts.lost) > 1 else ""
    title = f"{node}{more} {'were' if more else 'was'} lost ({cause})"
    return Failure("infrastructure", title, detail or cause, node)


def _killed(facts: FailureEvidence, *, by_oom: bool) -> Failure | None:
    def wanted(exit: Exit) -> bool:
        return exit.out_of_memory if by_oom else exit.signal not in CRASH_SIGNALS

    killed = _first(facts, lambda e: e.signal is not None and wanted(e))
    if killed is None:
        return None
    node, exit = killed
    how = ": out of memory" if by_oom else f" by {_signal(exit)}"
    why = "sent because memory ran out" if by_oom else "from outside the job"
    evidence = f"{_signal(exit)} {when(exit)}, {why}{_others(facts, exit)}"
    title = f"{_where(exit, node)} was killed{how}"
    return Failure("infrastructure", title, evidence, node, exit.rank, exit)


@dataclass(frozen=True, slots=True)
class _Raised:
    """A rule about exceptions."""

    wanted: Callable[[Exit], bool]
    failure_class: FailureClass = "infrastructure"
    damaged: bool = False

    def __call__(self, facts: FailureEvidence) -> Failure | None:
        raised = _first(
            facts, lambda e: bool(e.error_type) and not is_secondary(e) and self.wanted(e)
        )
        if raised is None:
            return None
        node, exit = raised
        title = f"{_where(exit, node)} raised {exit.error_type} {when(exit)}"
        frame = last_frame(exit.traceback)
        evidence = f"{exit.error_type}: {exit.error_message}" + (f" at {frame}" if frame else "")
        evidence += _others(facts, exit)
        return Failure(
            self.failure_class, title, evidence, node, exit.rank, exit, damaged=self.damaged
        )


def _device_error(exit: Exit) -> bool:
    text = exit.error_message.lower()
    return exit.error_type == "AcceleratorError" or any(word in text for word in DEVICE_WORDS)


def _aborted_together(facts: FailureEvidence) -> tuple[Exit, ...]:
    """Exits by SIGABRT on several nodes within seconds: torch's watchdog of NCCL ends all ranks of
    a group whose connection broke, and crashes of native code are not simultaneous."""
    aborted = [(n, e) for n, e in facts.exits if is_failure(e) and e.signal == SIGABRT]
    times = [exit.at_ns for _node, exit in aborted]
    apart_s = (max(times) - min(times)) / 1e9 if times else 0.0
    several = len({node for node, _exit in aborted}) > 1
    return tuple(e for _n, e in aborted) if several and apart_s <= ABORTED_TOGETHER_S else ()


def _crash(facts: FailureEvidence) -> Failure | None:
    together = _aborted_together(facts)
    crashed = _first(
        facts,
        lambda e: e.signal in CRASH_SIGNALS and not is_secondary(e) and e not in together,
    )
    if crashed is None:
        return None
    node, exit = crashed
    title = f"{_where(exit, node)} crashed with {_signal(exit)}"
    evidence = f"{_signal(exit)} {when(exit)} in native code"
    frame = last_frame(exit.traceback)
    evidence += f", called at {frame}" if frame else ""
    evidence += f"; last output: {exit.error_message}" if exit.error_message else ""
    evidence += _others(facts, exit)
    return Failure("infrastructure", title, evidence, node, exit.rank, exit)


def _exit_code(facts: FailureEvidence) -> Failure | None:
    exited = _first(facts, lambda e: e.code not in (None, 0) and not is_secondary(e))
    if exited is None:
        return None
    node, exit = exited
    title = f"{_where(exit, node)} ended with exit code {exit.code}"
    evidence = f"exit code {exit.code} {when(exit)} without an exception"
    evidence += f"; last output: {exit.error_message}" if exit.error_message else ""
    evidence += _others(facts, exit)
    return Failure("user", title, evidence, node, exit.rank, exit)


def _network(facts: FailureEvidence) -> Failure | None:
    together = _aborted_together(facts)
    failed = _first(facts, lambda e: is_secondary(e) or e in together)
    if failed is None:
        return None
    node, exit = failed
    title = f"{_where(exit, node)} lost its connection to its peers"
    what = f"{exit.error_type}: {exit.error_message}" if exit.error_type else _signal(exit)
    if exit.signal is not None and exit.error_message:
        what += f": {exit.error_message}"
    if together:
        what += f"; {len(together)} workers on several nodes were aborted within seconds"
    evidence = f"{what}; no worker or node shows another cause"
    return Failure("infrastructure", title, evidence, "", exit.rank, exit)


def _unknown(facts: FailureEvidence) -> Failure | None:
    return Failure("infrastructure", "the job was interrupted", "no cause was reported")


TABLE: tuple[tuple[str, Match], ...] = (
    ("launch-failed", _launch),
    ("journal-behind", _journal_behind),
    ("checkpoint-refused", _refused),
    ("preempted", _preempted),
    ("lost-first", lambda facts: _lost(facts) if facts.lost_first else None),
    ("left-early", _left_early),
    ("hang", _hang),
    ("out-of-memory-kill", partial(_killed, by_oom=True)),
    ("outside-signal", partial(_killed, by_oom=False)),
    ("checkpoint-damaged", _Raised(lambda e: e.error_type in DAMAGED_TYPES, damaged=True)),
    ("checkpoint-missing", _Raised(lambda e: e.error_type in MISSING_TYPES, damaged=True)),
    ("checkpoint-unreadable", _Raised(lambda e: e.error_type in UNREADABLE_TYPES)),
    (DIVERGED, _Raised(lambda e: e.error_type in DIVERGED_TYPES)),
    ("out-of-memory", _Raised(lambda e: e.out_of_memory)),
    ("device-missing", _Raised(lambda e: e.error_type in MISSING_DEVICE_TYPES)),
    ("device-error", _Raised(_device_error)),
    ("user-exception", _Raised(lambda e: True, "user")),
    ("exit-code", _exit_code),
    ("native-crash", _crash),
    ("node-lost", _lost),
    ("network", _network),
    ("unknown", _unknown),
)
"""The first match wins. Causes stand above consequences: a signal from outside or an exception of a
worker explains its peers' network errors, a lost node explains everything that follows it."""


def attribute(facts: FailureEvidence) -> Failure:
    """The first match of the table."""
    for rule, match in TABLE:
        if (failure := match(facts)) is not None:
            return replace(failure, rule=rule)
    raise AssertionError("the last rule of the table matches everything")

"""Starts of a script's workers that wait: until the job's uploaded code is here, and until the
script's own checkpoints were looked at.

The look is in a thread: a file system that does not answer stops no heartbeat. Invariant: each
Fork that is held is carried out once, or answered with ForkFailed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.environment import RESUME_FROM, RESUME_SINCE
from holdfast.orchestrator.tasks import TaskSet

from ..machine import commands, inputs
from ..pool.file_audit import OWN_CHECKPOINTS
from ..storage import checkpoint_guard, script_checkpoints
from ..storage.checkpoint_guard import Findings
from .uploaded_code import CodeUnavailable, UploadedCode


@dataclass(frozen=True)
class StartSetting:
    """Directory in which a worker starts, and its further environment variables."""

    directory: str
    """Directory to which spec.workingDirectory is relative."""
    environment: dict[str, str] = field(default_factory=dict)


class GuardedStarts:
    """Starts the workers of one node. `fork` starts a worker."""

    def __init__(
        self,
        fork: Callable[[commands.Fork, StartSetting], None],
        give: Callable[[inputs.Input], None],
        send: Callable[[m.NodeRemarked | m.AgentEvent], None],
        code: UploadedCode,
    ) -> None:
        self._fork, self._give, self._send, self._code = fork, give, send, code
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-guard")
        self._held: dict[int, list[commands.Fork]] = {}
        """Generation -> starts that wait."""
        self._tasks = TaskSet()

    def begin(self, fork: commands.Fork, job: TrainingJob, welcome: m.Welcome) -> None:
        """Start a worker, now or when nothing has to be waited for any more. The first one of a
        generation begins what all of them wait for."""
        if not (fork.code or _is_guarded(fork, job, welcome)):
            self._fork(fork, StartSetting(welcome.spec_directory))
            return
        held = self._held.setdefault(fork.membership.generation, [])
        held.append(fork)
        if len(held) == 1:
            self._tasks.start(self._prepare(fork, job, welcome))

    def dropped(self, generation: int, rank: int) -> bool:
        """A kill of a worker that was not started yet: it will not be."""
        held = self._held.get(generation, [])
        for fork in held:
            if fork.seat.rank == rank:
                held.remove(fork)
                self._give(inputs.ForkFailed(generation, rank, "stopped before it was started"))
                return True
        return False

    async def _prepare(self, first: commands.Fork, job: TrainingJob, welcome: m.Welcome) -> None:
        generation, directory = first.membership.generation, welcome.spec_directory
        try:
            if first.code:
                directory = await self._code.directory(first.code)
            extra = {}
            if _is_guarded(first, job, welcome):
                since_ns = welcome.submitted_ns
                newest = await self._look(job, directory, since_ns, first)
                variables = {RESUME_SINCE: str(since_ns), RESUME_FROM: newest or ""}
                variables[OWN_CHECKPOINTS] = _earlier(first, job) if newest else ""
                extra = {name: value for name, value in variables.items() if value}
            setting = StartSetting(directory, extra)
        except (CodeUnavailable, OSError) as error:  # OSError: no temporary directory, say
            for fork in self._held.pop(generation, []):
                self._give(inputs.ForkFailed(generation, fork.seat.rank, str(error)))
            return
        for fork in self._held.pop(generation, []):
            self._fork(fork, setting)

    async def _look(
        self, job: TrainingJob, directory: str, since_ns: int, first: commands.Fork
    ) -> str | None:
        """Set incomplete checkpoints aside; the newest complete one."""
        ranks = _ranks(first)
        checkpoints = first.membership.own_checkpoints
        written = [Path(checkpoint.path) for checkpoint in checkpoints]
        failed = [Path(checkpoint.path) for checkpoint in checkpoints if checkpoint.failed]
        named = checkpoint_guard.may_name(job)

        def in_thread() -> Findings:
            where = checkpoint_guard.roots(job, directory)
            return checkpoint_guard.look(
                where, since_ns, ranks, written, named=named, failed=failed
            )

        look = asyncio.get_running_loop().run_in_executor(self._thread, in_thread)
        try:
            timeout_s = checkpoint_guard.LOOK_TIMEOUT_S + 1.0
            findings = await asyncio.wait_for(asyncio.shield(look), timeout_s)
        except TimeoutError:
            findings = Findings(cut_short=checkpoint_guard.TOO_SLOW)
        except Exception as error:  # whatever a file system raises, the workers start
            findings = Findings(cut_short=f"{type(error).__name__}: {error}")
        for text in findings.set_aside:
            self._send(m.NodeRemarked(text=text))
        if findings.cut_short:
            text = f"not all checkpoints of the script were looked at: {findings.cut_short}"
            self._send(m.AgentEvent(text=text))
        if findings.divided is not None and findings.divided[1] != ranks[2]:
            self._send(m.NodeRemarked(text=_other_size(*findings.divided, ranks[2])))
        if findings.newest is None:
            return None
        written_ns, path = findings.newest
        if first.node_rank == 0:
            self._send(m.NodeRemarked(text=_describe(path, written_ns)))
            for _, other in findings.passed_over:
                if other != path:
                    text = f"{path} comes before {other}, with which a start failed"
                    self._send(m.NodeRemarked(text=text))
        return str(path)


def _describe(path: Path, written_ns: int) -> str:
    step = script_checkpoints.step_of(path)
    which = f" of step {step}" if step is not None else ""
    age_s = max(0.0, (time.time_ns() - written_ns) / 1e9)
    return f"the script's newest complete checkpoint{which} is {path}, written {age_s:.0f} s ago"


def _earlier(fork: commands.Fork, job: TrainingJob) -> str:
    """Checkpoints of earlier generations for file_audit.py, as JSON."""
    files = [(c.path, c.times) for c in fork.membership.own_checkpoints]
    hold = job.spec.recovery.on_ignored_checkpoint == "hold"
    return json.dumps({"known": files, "hold": hold}) if files else ""


def _ranks(fork: commands.Fork) -> tuple[int, int, int]:
    """First rank of this node, how many it has, how many the job has."""
    each = fork.membership.workers_per_node
    return fork.node_rank * each, each, fork.membership.mesh.world_size


def _other_size(tag: Path, written_by: int, num_ranks: int) -> str:
    return (
        f"checkpoint {tag} of DeepSpeed was written by {written_by} ranks, and {num_ranks} are "
        "started: rank 0 converts it when the script loads it, if Holdfast is installed for the "
        "script's Python"
    )


def _is_guarded(fork: commands.Fork, job: TrainingJob, welcome: m.Welcome) -> bool:
    """True if the script may have checkpoints of its own."""
    membership, entry = fork.membership, job.spec.entrypoint
    first = not membership.restart_count or not welcome.submitted_ns
    guarded = job.spec.checkpoint.guard.chosen != "never" and entry.recipe is None
    return guarded and not first and membership.restore is None

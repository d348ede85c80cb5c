"""What a script writes by itself is known to the next generation, on any node."""

from __future__ import annotations

from holdfast.orchestrator.core.events import OwnCheckpointSeen
from holdfast.orchestrator.core.own_checkpoints import MAX_KNOWN
from holdfast.orchestrator.protocol.facts import OwnCheckpoint

from .harness import Transcript


def written(path: str, generation: int = 1, times: int = 1) -> OwnCheckpointSeen:
    return OwnCheckpointSeen(node="a", generation=generation, path=path, times=times)


def test_the_last_written_checkpoints_are_known_with_their_most_writes() -> None:
    job = Transcript().started()
    for number in range(MAX_KNOWN + 5):
        job.apply(written(f"/o/step-{number}"))
    job.apply(written("/o/ckpt.pt", times=2))
    job.apply(written("/o/step-60", generation=2))
    job.apply(written("/o/ckpt.pt", generation=2))
    known = list(job.state.own_checkpoints.values())
    assert len(known) == MAX_KNOWN
    assert known[-2] == OwnCheckpoint(path="/o/step-60", generation=2)
    assert known[-1] == OwnCheckpoint(path="/o/ckpt.pt", generation=2, times=2)

"""Reports about a script's own checkpoints are few, and none that counts is lost."""

from __future__ import annotations

from holdfast.workers.agent.storage.own_checkpoints import BURST, MAX_KNOWN, OwnCheckpoints
from holdfast.workers.worker_protocol import CheckpointWritten


def written(path: str, *, waits: bool = False) -> CheckpointWritten:
    return CheckpointWritten(path=path, unread=waits, waits=waits)


def test_a_file_that_is_written_again_is_reported_twice_then_now_and_then() -> None:
    own = OwnCheckpoints()
    sent = [own.wrote(float(second), (1, 0), written("/o/ckpt.pt")) for second in range(100)]
    assert [one.times for one in sent if one is not None] == [1, 2, 32, 62, 92]


def test_each_generation_counts_from_one() -> None:
    own = OwnCheckpoints()
    own.wrote(0.0, (1, 0), written("/o/ckpt.pt"))
    again = own.wrote(1.0, (2, 0), written("/o/ckpt.pt"))
    assert again is not None and (again.generation, again.times) == (2, 1)


def test_thousands_of_files_do_not_flood_the_controller() -> None:
    own = OwnCheckpoints()
    sent = [own.wrote(0.0, (1, 0), written(f"/cache/{number}.pt")) for number in range(5000)]
    assert len([one for one in sent if one is not None]) == BURST
    later = own.wrote(100.0, (1, 0), written("/o/checkpoint-5"))
    assert later is not None and len(own.known()) == MAX_KNOWN and own.known()[-1] == later


def test_a_file_that_each_rank_writes_once_was_written_once() -> None:
    own = OwnCheckpoints()
    sent = [own.wrote(0.0, (1, rank), written("/o/vocab.pt")) for rank in range(8)]
    assert [one.times for one in sent if one is not None] == [1]


def test_a_rank_that_waits_is_reported_in_any_case_and_again_to_a_new_controller() -> None:
    own = OwnCheckpoints()
    for number in range(5000):
        own.wrote(0.0, (1, 0), written(f"/cache/{number}.pt"))
    waiting = own.wrote(0.0, (1, 0), written("/o/ckpt.pt", waits=True))
    assert waiting is not None and waiting.waits and own.known()[-1] == waiting

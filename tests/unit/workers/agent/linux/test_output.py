"""Output that never fails, and logs with a bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.workers.agent.linux import output


def test_printing_to_a_full_disk_does_not_raise() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        stream = output.stream(fd, "backslashreplace")
        for _ in range(1000):
            print("training continues", "x" * 100, file=stream, flush=True)
    finally:
        os.close(fd)


def test_a_log_that_cannot_be_created_goes_nowhere(tmp_path: Path) -> None:
    fd = output.log_descriptor(str(tmp_path / "missing" / "rank-0.log"))
    assert os.path.samestat(os.fstat(fd), Path(os.devnull).stat())
    os.close(fd)


def test_a_large_log_is_moved_aside_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 10)
        assert not output.rotate(log, bound_bytes=40)
        writer.write(b"more\n")
        assert output.rotate(log, bound_bytes=40)
        writer.write(b"new\n")
    assert log.read_bytes() == b"new\n"
    assert log.with_name("rank-00000.log.1").read_bytes() == b"old\n" * 10 + b"more\n"


def test_a_log_that_cannot_be_moved_aside_keeps_its_bound_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation runs in the agent, which holds training state."""
    log = tmp_path / "agent-node-0.log"
    log.write_bytes(b"x" * 41)
    log.with_name(f"{log.name}.1").mkdir()
    assert output.rotate(log, bound_bytes=40) and not log.read_bytes()
    log.write_bytes(b"x" * 41)

    def gone(*_args: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(output.os, "truncate", gone)  # the directory was just deleted
    assert not output.rotate(log, bound_bytes=40)


def test_logs_of_the_newest_generations_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        (tmp_path / f"gen-{number:04d}").mkdir()
    (tmp_path / "gen-notes").mkdir()
    found = output.old_generations(tmp_path / "gen-0005", keep=3)
    assert {path.name for path in found} == {"gen-0001", "gen-0002"}

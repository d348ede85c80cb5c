"""`python -m bench.kill_points`: a writer of checkpoints is stopped at each of its changes.

Each point is a process of its own, which writes with the production code to a real file system and
is stopped (bench/stopping.py) at its n-th change, for every n, on SIGKILL and on two kinds of power
failure. Then the production code lists and restores: the result has to be a whole committed step,
bit by bit, not older than the newest whose commit had returned, and the next save has to succeed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from holdfast.orchestrator.api.v1alpha1.resilience import Retention
from holdfast.orchestrator.protocol.facts import ShardFile, StagedShard
from holdfast.orchestrator.protocol.manifest import (
    Manifest,
    directory_name,
    shard_file_name,
)
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.workers.agent.storage import persist
from holdfast.workers.agent.storage.memfd import Memfd
from holdfast.workers.checkpoint import inspect, repair
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.shard_sources import CheckpointFiles, ShardSource
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from tests.unit.workers.checkpoint.fake_ranks import Memory, ShardInBytes, as_rank, build
from tests.unit.workers.checkpoint.fake_ranks import step as optimizer_step

from . import conditions
from .stopping import STOPPED, Changes, Loss

JOB, GENERATION = "tiny", 3
CHUNK_BYTES = 2048
"""Replaces the agent's 4 MiB, so that the small shards take several writes."""
STEPS = 6
Report = Callable[[int], None]
"""Called with each step whose commit has returned."""
Files = dict[int, bytes]


@dataclass(frozen=True)
class Layout:
    """Layout of what is written."""

    shards: int
    width: int
    """Width of the model, which sets its size."""
    before: int
    """Checkpoints that are committed before: steps 0 to before - 1; the writer saves the next."""
    keep: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(shard=self.shards)

    def files(self, step: int) -> Files:
        return _files(self.shards, self.width)[step]

    def __str__(self) -> str:
        size = sum(map(len, self.files(0).values()))
        return f"{self.shards} shards, {size} bytes, keep {self.keep}, after {self.before}"


@functools.cache
def _files(shards: int, width: int) -> dict[int, Files]:
    """Step -> what the ranks of a real (small) FSDP2 model stage after it."""
    found: dict[int, Files] = {step: {} for step in range(STEPS)}
    for rank in range(shards):
        with as_rank(rank, shards):
            model, optimizer = build(1, shards, seed=1, width=width)
            memory = Memory()
            stager = Stager(
                TrainingState(model, optimizer, None), memory,
                generation=1, shard=rank, num_shards=shards, device=torch.device("cpu"),
            )  # fmt: skip
            for step in range(STEPS):
                optimizer_step(model, optimizer, seed=100 + step)
                stager.stage(step)
                found[step][rank] = memory.file
    return found


@functools.cache
def _values(layout: Layout, step: int) -> dict[str, torch.Tensor]:
    files = layout.files(step)
    got = restored(layout, step, lambda shard: ShardInBytes(files[shard], f"shard {shard}"))
    return {name: value.clone() for name, value in got.items()}


@functools.cache
def _state(width: int) -> TrainingState:
    """State of one rank without peers, which restores the whole model from all shards."""
    model, optimizer = build(1, 1, seed=2, width=width)
    optimizer_step(model, optimizer, seed=3)
    return TrainingState(model, optimizer, None)


def restored(
    layout: Layout, step: int, open_shard: Callable[[int], ShardSource]
) -> dict[str, torch.Tensor]:
    """Tensors of that rank afterwards; valid until the next call."""
    state = _state(layout.width)
    held = {one.name: one.local for one in state.tensors()}
    for value in held.values():
        value.detach().fill_(7)  # nothing of the restore before may be left
    restore(state, open_shard, shard=0, num_shards=1, num_stored=layout.shards, step=step)
    return held


# -- what is written ---------------------------------------------------------------------------
def write_shards(
    path: str, layout: Layout, step: int, generation: int, only: Sequence[int] | None = None,
    note: bool = False,
) -> tuple[ShardFile, ...]:  # fmt: skip
    """Write as the agents do; `note`: without a controller."""
    found = []
    directory = directory_name(step, generation)
    for shard, content in layout.files(step).items():
        if only is not None and shard not in only:
            continue
        memory, name = Memfd("staged", len(content)), shard_file_name(shard, layout.shards)
        os.pwrite(memory.fd, content, 0)
        done = persist.write_shard(memory, len(content), path, directory, name)
        one = StagedShard(step, generation, shard, layout.shards, len(content))
        if note:
            persist.write_note(persist.note_of(one, name, done, layout.mesh), path, directory, name)
        found.append(ShardFile(step, generation, shard, layout.shards, name, len(content), *done))
    return tuple(found)


def save(path: str, layout: Layout, step: int, generation: int, report: Report) -> None:
    """Shards, manifest, and the deletion of what is not kept."""
    store = CheckpointStore(path, JOB)
    store.commit(step, layout.mesh, write_shards(path, layout, step, generation))
    report(step)
    for old in store.manifests()[: -layout.keep]:
        store.delete(old.step, old.generation)


@dataclass(frozen=True)
class Case:
    """A kind of writer."""

    name: str
    write: Callable[[str, Layout, Report], None]
    prepare: Callable[[str, Layout], None] = lambda path, layout: None
    """Function called after the committed checkpoints, before the writer."""
    adopts: bool = False
    """The next controller commits what agents have written without one."""
    damaged: bool = False
    """The newest checkpoint is damaged before the writer begins."""
    jobs: tuple[str, ...] = (JOB,)


def _save(path: str, layout: Layout, report: Report) -> None:
    save(path, layout, layout.before, GENERATION, report)


def _agents(path: str, layout: Layout, report: Report) -> None:
    """The last shard's agent is stopped; those of the others had written."""
    write_shards(path, layout, layout.before, GENERATION, only=[layout.shards - 1])


def _others(path: str, layout: Layout) -> None:
    others = list(range(layout.shards - 1))
    write_shards(path, layout, layout.before, GENERATION, only=others)


def _drain(path: str, layout: Layout, report: Report) -> None:
    """Agents without a controller write what only memory holds."""
    write_shards(path, layout, layout.before, GENERATION, note=True)
    report(layout.before)


def _adopt_written(path: str, layout: Layout, report: Report) -> None:
    """The next controller commits what they have written."""
    CheckpointStore(path, JOB).adopt_written(GENERATION, Retention(keep_last=layout.keep))
    report(layout.before)


def _delete(path: str, layout: Layout, report: Report) -> None:
    store = CheckpointStore(path, JOB)
    for step in range(layout.before - 1):
        store.delete(step, GENERATION - 1)


def _damage(path: str, layout: Layout) -> None:
    """One bit of a tensor's bytes in the newest checkpoint."""
    files, name = CheckpointFiles(path), directory_name(layout.before - 1, GENERATION - 1)
    file = f"{files.root}/{name}/{shard_file_name(layout.shards - 1, layout.shards)}"
    data = bytearray(files.filesystem.cat_file(file))
    data[-8] ^= 1
    files.filesystem.pipe_file(file, bytes(data))


def _repair(path: str, layout: Layout, report: Report) -> None:
    done = repair.repair(path, write=True)
    assert done.written, done.problems


def _rename(path: str, layout: Layout, report: Report) -> None:
    """The checkpoints become those of a job with another name."""
    CheckpointStore(path, "renamed").adopt(CheckpointStore(path, JOB).manifests())


CASES = (
    Case("save, and deletion of older ones", _save),
    Case("save, one agent of several stopped", _agents, _others),
    Case("final drain without a controller", _drain, adopts=True),
    Case("takeover that commits what agents wrote", _adopt_written,
         lambda path, layout: _drain(path, layout, lambda step: None), adopts=True),
    Case("deletion", _delete),
    Case("repair", _repair, _damage, damaged=True),
    Case("checkpoints given to another job", _rename, jobs=(JOB, "renamed")),
)  # fmt: skip


# -- what is there afterwards --------------------------------------------------------------------
def check(path: str, case: Case, layout: Layout, done: int) -> None:
    """Raises AssertionError. `done`: the newest step whose commit had returned."""
    store = CheckpointStore(path, JOB)
    store.prepare()
    if case.adopts:
        store.adopt_written(GENERATION, Retention(keep_last=layout.keep))
    found = store.manifests()
    assert not store.damaged(), f"torn manifests: {store.damaged()}"
    assert {one.job for one in found} <= set(case.jobs), found
    whole = [one for one in found if inspect.verify(path, one).ok]
    num_damaged = len(found) - len(whole)
    assert num_damaged <= case.damaged, f"{num_damaged} committed checkpoints are not whole"
    assert whole, "no checkpoint is left"
    newest = whole[-1]
    least = max(done, layout.before - 1 - case.damaged)
    assert least <= newest.step <= layout.before, f"step {newest.step}, {least} was committed"
    expect_values(path, layout, newest, exact=not newest.repaired)
    # The next generation goes on, over what the stopped writer has left.
    again = layout.before + 1
    save(path, layout, again, 1 + max(one.generation for one in [*found, _FIRST]), lambda _: None)
    last = store.manifests()[-1]
    assert last.step == again and inspect.verify(path, last).ok, "the next save"
    expect_values(path, layout, last, exact=True)


_FIRST = Manifest(job=JOB, step=0, generation=GENERATION, mesh=Mesh(), files=(), committed_at="")


def expect_values(path: str, layout: Layout, manifest: Manifest, *, exact: bool) -> None:
    """The restored tensors are those of its step; `exact`: and the files, byte by byte. A repaired
    checkpoint has one part of an older one."""
    files = CheckpointFiles(path)
    at = {file.shard: file for file in manifest.files}
    got = restored(layout, manifest.step, lambda shard: files.open(manifest.directory, at[shard]))
    if not exact:
        return
    want = _values(layout, manifest.step)
    assert got.keys() == want.keys()
    differ = [name for name, value in want.items() if not _same(got[name], value)]
    assert not differ, f"step {manifest.step}: {differ} differ"
    for shard, content in layout.files(manifest.step).items():
        with files.filesystem.open(f"{files.root}/{manifest.directory}/{at[shard].file}") as file:
            assert file.read() == content, f"step {manifest.step}: the file of shard {shard}"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: NaN equals itself, and 0.0 is not -0.0."""
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(left, right)


# -- points ----------------------------------------------------------------------------------------
@dataclass
class Outcome:
    """The outcome of all points of some cases and layouts."""

    points: Counter[str] = field(default_factory=Counter)
    """Case -> points."""
    losses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def num(self) -> int:
        return sum(self.points.values())


class Place:
    """A directory with the committed checkpoints of a layout, copied for every point."""

    def __init__(self, root: Path, case: Case, layout: Layout) -> None:
        self._base, self._copy = root / "base", root / "copy"
        self._case, self._layout = case, layout
        path = str(self._base)
        self._base.mkdir()
        for step in range(layout.before):
            files = write_shards(path, layout, step, GENERATION - 1)
            CheckpointStore(path, JOB).commit(step, layout.mesh, files)
        case.prepare(path, layout)

    def run(self, stop_at: int, loss: Loss) -> tuple[int, int]:
        """(number of changes, newest step whose commit returned) of a writer that is stopped there;
        number 0: it was. Raises AssertionError if it failed by itself."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._base, self._copy)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            self._child(writer, Changes(stop_at, loss))
        os.close(writer)
        with os.fdopen(reader) as stream:
            words = stream.read().split()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, STOPPED), f"the writer failed: {' '.join(words)}"
        count = int(words.pop()) if status == 0 else 0
        return count, max(map(int, words), default=-1)

    def _child(self, writer: int, changes: Changes) -> None:
        def say(value: object) -> None:
            os.write(writer, f"{value}\n".encode())

        try:
            changes.watch()
            self._case.write(str(self._copy), self._layout, say)
            say(changes.count)
            os._exit(0)
        except BaseException as error:
            say(repr(error).replace("\n", " "))
            os._exit(1)

    def check(self, done: int) -> None:
        check(str(self._copy), self._case, self._layout, done)


def stop_everywhere(case: Case, layout: Layout, losses: Sequence[Loss], outcome: Outcome) -> None:
    """The writer of a case is stopped at each of its changes. A problem leaves its directory."""
    persist.CHUNK_BYTES = CHUNK_BYTES
    root = Path(tempfile.mkdtemp(prefix="holdfast-kill-points-", dir=_memory()))
    place = Place(root, case, layout)
    count, _ = place.run(0, Loss.NOTHING)
    for loss in losses:
        for stop_at in range(1, count + 1):
            _, done = place.run(stop_at, loss)
            outcome.points[case.name] += 1
            outcome.losses[loss.value] += 1
            left = root / f"{loss.name.lower()}-{stop_at}"
            try:
                shutil.copytree(root / "copy", left)
                place.check(done)
            except Exception as error:
                what = (
                    f"{case.name}, {layout}: stopped at change {stop_at} of {count}, {loss.value}"
                )
                outcome.problems.append(f"{what}: {error} ({left})")
            else:
                shutil.rmtree(left)
    if not any(str(root) in problem for problem in outcome.problems):
        shutil.rmtree(root)


def _memory() -> str | None:
    """A file system in memory: a point needs a few milliseconds there."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def layouts() -> Iterator[Layout]:
    """Endless, from small to large."""
    for width in itertools.count(7, 60):
        for shards in (2, 1, 3, 4, 8):
            for before, keep in ((2, 1), (2, 2), (3, 2), (4, 1)):
                yield Layout(shards, width, before, keep)


def cases_of(layout: Layout) -> list[Case]:
    """A repair, which has most points, deletes nothing: one for all layouts that differ in what is
    kept."""
    return [one for one in CASES if not one.damaged or (layout.before, layout.keep) == (2, 1)]


# -- the command -----------------------------------------------------------------------------------
def main(before: Callable[[Outcome], None] = lambda outcome: None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10_000, help="at least so many")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a page with the figures (.md)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, outcome = time.monotonic(), Outcome()
    before(outcome)
    every = ((one, case) for one in layouts() for case in cases_of(one))
    for layout, case in every:
        if outcome.num >= options.points or time.monotonic() > began + 60 * options.minutes:
            break
        stop_everywhere(case, layout, list(Loss), outcome)
        show_progress(outcome, str(layout))
    seconds = time.monotonic() - began
    if options.json:
        print(json.dumps({
            "points": outcome.num, "whole": outcome.num - len(outcome.problems),
            "seconds": round(seconds, 1), "cases": outcome.points, "stopped": outcome.losses,
            "problems": outcome.problems,
        }, indent=1))  # fmt: skip
    else:
        print("", *page(outcome, seconds), sep="\n")
    if options.out:
        facts = [f"{name}: {value}. " for name, value in conditions.describe().items()]
        lines = ["# Kill points inside a save", "", *facts, "", *page(outcome, seconds)]
        options.out.write_text("\n".join(lines) + "\n")
    raise SystemExit(1 if outcome.problems else 0)


def show_progress(outcome: Outcome, what: str) -> None:
    text = f"{outcome.num} points, {len(outcome.problems)} wrong: {what}"
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def page(outcome: Outcome, seconds: float) -> list[str]:
    good = outcome.num - len(outcome.problems)
    lines = [
        f"{good} of {outcome.num} points restore a whole step, bit by bit, and the next save "
        f"succeeds ({seconds:.0f} s; `python -m bench.kill_points`).",
        "",
        "| writer | points |",
        "|---|---|",
        *(f"| {name} | {num} |" for name, num in outcome.points.items()),
        "",
        "| how it is stopped | points |",
        "|---|---|",
        *(f"| {name} | {num} |" for name, num in outcome.losses.items()),
    ]
    if outcome.problems:
        lines += ["", *(f"* {problem}" for problem in outcome.problems)]
    return lines


if __name__ == "__main__":
    main()

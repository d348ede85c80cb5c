"""Measurements of the kit: what each needs, its record, and the order in which they run.

Each measurement runs in a process of its own, so that a broken CUDA context ends with it. A record
has figures only if its measurement ended well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from bench.contestants.base import PYTHONPATH, ROOT, kill_trees, print_logs

OLDEST_TORCH = (2, 11)
PART_S = 540.0
"""Seconds of one part in one call: a command on the target machine ends after ten minutes."""
GB = 10**9
Figures = dict[str, Any]
Outcome = Literal["measured", "skipped", "failed"]


class Skip(Exception):
    """A measurement found out that it cannot be made here; the text is the reason."""


@dataclass(frozen=True)
class Machine:
    """Properties that decide which measurements are possible."""

    torch: str
    cuda: str = ""
    """CUDA that torch is built for."""
    gpu: str = ""
    """Empty: none that torch can use."""
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    driver: str = ""
    why: str = ""
    """Reason why torch can use no GPU."""


@dataclass(frozen=True)
class Kit:
    """Arguments of a measurement."""

    rehearse: bool
    """Rehearsal on CPUs, with gloo and tiny sizes."""
    scratch: Path
    folder: Path = Path()
    """Records so far."""

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def size(self, real: Any, tiny: Any) -> Any:
        return tiny if self.rehearse else real


@dataclass(frozen=True)
class Measurement:
    """One row of figures. `value`: 0 is the most valuable one."""

    part: str
    name: str
    run: Callable[[Kit], Figures]
    seconds: float
    """Seconds on an H100. With less time left the measurement does not start, and it ends after
    three times as long."""
    value: int = 5
    device_gb: float = 1.0
    capability: tuple[int, int] = (7, 0)
    packages: tuple[str, ...] = ()
    on_cpu: bool = True
    """True if --rehearse has it."""

    @property
    def file(self) -> str:
        return re.sub(r"\W+", "-", self.name.lower()).strip("-")


@dataclass
class Record:
    """Result of a measurement."""

    part: str
    name: str
    outcome: Outcome
    why: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0
    attempts: int = 1
    rehearsal: bool = False
    where: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.figures and self.outcome != "measured":
            raise ValueError(f"{self.part}/{self.name} was {self.outcome}, and has figures")


# -- the machine ----------------------------------------------------------------------------------
def look() -> Machine:
    """The facts of this machine, from a process that ends: the caller gets no CUDA context."""
    words = [sys.executable, "-m", "bench.gpu.one", "--machine"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    return Machine(**{**facts, "capability": tuple(facts["capability"])})


def describe_here() -> Machine:
    import torch

    smi = shutil.which("nvidia-smi")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False) if smi else None
    driver = done.stdout.split("\n")[0].strip() if done is not None and not done.returncode else ""
    version, cuda = str(torch.__version__), torch.version.cuda or ""
    if not torch.cuda.is_available():
        if not cuda:
            why = f"torch {version} is built without CUDA"
        elif driver:
            why = f"driver {driver} does not run the CUDA {cuda} of torch {version}"
        else:
            why = "this machine has no GPU, or no driver: nvidia-smi shows none"
        return Machine(version, cuda, driver=driver, why=why)
    found = torch.cuda.get_device_properties(0)
    capability = (found.major, found.minor)
    return Machine(version, cuda, found.name, found.total_memory, capability, driver)


def unmet(one: Measurement, machine: Machine, rehearse: bool) -> str:
    """Condition that is not met here; empty: none."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", machine.torch)[:2])
    if numbers < OLDEST_TORCH:
        return f"torch {machine.torch}; Holdfast needs 2.11 or newer"
    missing = [name for name in one.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if rehearse:
        return "" if one.on_cpu else "not in the rehearsal: it needs a GPU, or repeats another one"
    if not machine.gpu:
        return machine.why
    if machine.memory_bytes < one.device_gb * GB:
        has = machine.memory_bytes / GB
        return f"needs {one.device_gb:g} GB of device memory; {machine.gpu} has {has:.0f} GB"
    if machine.capability < one.capability:
        needed, has_it = (".".join(map(str, c)) for c in (one.capability, machine.capability))
        return f"needs compute capability {needed}; {machine.gpu} has {has_it}"
    return ""


# -- records --------------------------------------------------------------------------------------
class Folder:
    """One JSON for each measurement, with its log beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def place(self, one: Measurement, ending: str) -> Path:
        place = self.path / one.part / f"{one.file}{ending}"
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def write(self, one: Measurement, record: Record) -> None:
        place = self.place(one, ".json")
        part = place.with_suffix(".part")
        part.write_text(json.dumps(asdict(record), indent=1) + "\n")
        part.replace(place)

    def records(self) -> dict[tuple[str, str], Record]:
        """Every readable one, by part and name; a file that a full disk cut off is measured
        again."""
        records: dict[tuple[str, str], Record] = {}
        for place in sorted(self.path.glob("*/*.json")):
            with contextlib.suppress(ValueError, TypeError):
                record = Record(**json.loads(place.read_text()))
                records[record.part, record.name] = record
        return records


# -- running --------------------------------------------------------------------------------------
def run(
    chosen: Sequence[Measurement],
    folder: Folder,
    machine: Machine,
    *,
    minutes: float,
    rehearse: bool = False,
    again: bool = False,
    part_s: float = PART_S,
    say: Callable[[str], None] = print,
) -> None:
    """Make what lacks: the most valuable first, and what failed before at the end."""
    deadline = time.monotonic() + 60 * minutes
    spent: dict[str, float] = {}
    known = {} if again else folder.records()
    for one in in_order(chosen, known, rehearse):
        before = known.get((one.part, one.name))
        where = facts_of(machine)
        why = unmet(one, machine, rehearse)
        if why:
            record = Record(one.part, one.name, "skipped", why, rehearsal=rehearse, where=where)
        else:
            left = deadline - time.monotonic()
            if not rehearse:  # a busy CPU takes much longer
                left = min(left, part_s - spent.get(one.part, 0.0))
            if left < one.seconds:
                say(f"{one.part}: {one.name}: left out, needs {one.seconds:g} s of {left:.0f} s")
                continue
            limit_s = min(left, (9 if rehearse else 3) * one.seconds + 60)
            record = _run_one(one, folder, limit_s, rehearse)
            record.where = where
            record.attempts = 1 + (before.attempts if before else 0)
            spent[one.part] = spent.get(one.part, 0.0) + record.seconds
        folder.write(one, record)
        tail = record.why or json.dumps(record.figures)[:300]
        say(f"{one.part}: {one.name}: {record.outcome} in {record.seconds:.1f} s: {tail}")


def in_order(
    chosen: Iterable[Measurement], known: dict[tuple[str, str], Record], rehearse: bool
) -> list[Measurement]:
    """Measurements that are still to do."""

    def attempts(one: Measurement) -> int:
        record = known.get((one.part, one.name))
        return 0 if record is None or record.outcome == "skipped" else record.attempts

    def is_done(one: Measurement) -> bool:
        record = known.get((one.part, one.name))
        return record is not None and record.outcome == "measured" and record.rehearsal == rehearse

    return sorted((one for one in chosen if not is_done(one)), key=lambda m: (attempts(m), m.value))


def facts_of(machine: Machine) -> dict[str, str]:
    """Facts about the machine that the page shows beside each figure."""
    memory = f"{machine.memory_bytes / GB:.0f} GB" if machine.memory_bytes else ""
    facts = {"gpu": machine.gpu, "memory": memory, "driver": machine.driver}
    return {**facts, "torch": machine.torch, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _run_one(one: Measurement, folder: Folder, limit_s: float, rehearse: bool) -> Record:
    log, result = folder.place(one, ".log"), folder.place(one, ".figures")
    result.unlink(missing_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="hfg-"))  # short: sockets lie below it
    words = [sys.executable, "-m", "bench.gpu.one", one.part, one.name, str(result), str(scratch)]
    began = time.monotonic()
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*words, *(["--rehearse"] if rehearse else [])], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, start_new_session=True,
            env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": PYTHONPATH},
        )  # fmt: skip
    try:
        process.wait(limit_s)
        ended = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"not done after {limit_s:.0f} s"
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    finally:
        kill_trees([process.pid, *_started_in(scratch)])
        last = _last_error(log)
        if process.returncode != 0:
            with log.open("a") as out:
                print_logs(scratch, out)
        shutil.rmtree(scratch, ignore_errors=True)
    took_s = time.monotonic() - began
    outcome: Outcome = "failed"
    why, figures = f"{ended}; {log.name}: {last}", {}
    if process.returncode == 0 and result.exists():
        reply = json.loads(result.read_text())
        why, figures = reply["skip"], reply["figures"]
        outcome = "skipped" if why else "measured"
    return Record(one.part, one.name, outcome, why, figures, round(took_s, 1), rehearsal=rehearse)


def _started_in(scratch: Path) -> list[int]:
    """Processes that a measurement left: its scratch folder is in their environment."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("TMPDIR") == str(scratch):
                pids.append(process.pid)
    return pids


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error|error|Killed|Skip", line)]
    return (errors or lines or ["nothing was printed"])[-1][:300]

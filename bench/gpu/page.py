"""bench/results/gpu.md, from the records in bench/results/gpu.json.

Invariant: a figure on the page comes from a record of a GPU that was measured; a rehearsal, a
failure and a skipped measurement have none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from bench.contestants.base import ROOT

from . import branches, kit
from .kit import Folder, Measurement, Record

JSON = ROOT / "bench/results/gpu.json"
PAGE = JSON.with_suffix(".md")
RANK = {"measured": 2, "failed": 1, "skipped": 0}
HOW = """\
Every measurement runs in a process of its own, and its record is written at once, so a command that
was cut off goes on where it ended; on another machine, from bench/results/gpu.json. In a checkout,
which may lack .git but not build/wheels, on the machine with the GPU:

```bash
python -m bench.gpu.wheels download    # where there is a network: 20 MB to build/wheels
python3 -m bench.gpu.wheels install    # on the target: Python 3.12, torch with CUDA, no network
python3 -m bench.gpu all --minutes 9   # the most valuable measurements first; repeat to go on
python3 -m bench.gpu page              # this page and gpu.json, if a command was cut off
tar czf build/gpu.tar.gz build/gpu bench/results/gpu.*   # what to bring back, logs too
python -m bench.gpu all --rehearse     # the same order on a CPU, tiny sizes, no figures
```

`python3 -m bench.gpu PART` makes one part (nine minutes at most), `--only NAME` one measurement,
`--list` shows what is left, in order, with seconds. The logs are in build/gpu/PART.
"""


def folder_name(rehearse: bool) -> str:
    return str(ROOT / "build" / ("gpu-rehearsal" if rehearse else "gpu"))


def publish(folder: Folder) -> None:
    """Add the records of a folder to those of the page."""
    every = load()
    for key, record in folder.records().items():
        if record.rehearsal or not record.where.get("gpu"):
            continue
        if key not in every or RANK[record.outcome] >= RANK[every[key].outcome]:
            every[key] = record
    JSON.write_text(json.dumps([asdict(every[key]) for key in sorted(every)], indent=1) + "\n")
    PAGE.write_text(render(every))


def unpack(folder: Folder) -> None:
    """Give a folder the records of the page that it lacks, so that a new machine goes on."""
    from .parts import EVERY

    records, known = load(), folder.records()
    for one in EVERY:
        key = one.part, one.name
        if key in records and key not in known:
            folder.write(one, records[key])


def load() -> dict[tuple[str, str], Record]:
    rows = json.loads(JSON.read_text()) if JSON.exists() else []
    records = [Record(**row) for row in rows]
    wrong = [f"{r.part}: {r.name}" for r in records if r.rehearsal or not r.where.get("gpu")]
    if wrong:
        raise ValueError(f"{JSON.name}: not measured on a GPU: {', '.join(wrong)}")
    return {(record.part, record.name): record for record in records}


def render(records: dict[tuple[str, str], Record]) -> str:
    from .parts import EVERY, PARTS

    lines = ["# On a GPU", "", "Written by `python -m bench.gpu`.", ""]
    if not any(record.outcome == "measured" for record in records.values()):
        lines += ["**Not run: no machine with a GPU was at hand yet.** No figure is known.", ""]
    lines += ["## How to run it", "", HOW]
    for name, part in PARTS.items():
        lines += [f"## {name}", "", " ".join((part.__doc__ or "").split()), ""]
        mine = [one for one in EVERY if one.part == name]
        lines += ["| measurement | seconds | outcome | figures |", "|---|---|---|---|"]
        lines += [row(one, records.get((one.part, one.name))) for one in mine]
        lines += ["", *machines(r for r in records.values() if r.part == name)]
    lines += ["## CUDA in workers/, and its tests", ""]
    lines += ["| place | test on a GPU |", "|---|---|"]
    lines += [f"| {place} | {test} |" for place, test in sorted(branches.PLACES.items())]
    untested = [place for place, test in branches.PLACES.items() if test == branches.NO_TEST]
    lines += ["", f"{len(untested)} of {len(branches.PLACES)} have none: {', '.join(untested)}."]
    return "\n".join(lines) + "\n"


def row(one: Measurement, record: Record | None) -> str:
    if record is None:
        return f"| {one.name} | {one.seconds:g} | not run | |"
    text = "<br>".join(shown(record.figures)) if record.outcome == "measured" else record.why
    return f"| {one.name} | {record.seconds:g} | {record.outcome} | {text.replace('|', '/')} |"


def shown(figures: kit.Figures) -> Iterable[str]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield f"{name}: " + ", ".join(f"{key} {plain(each)}" for key, each in value.items())
        elif isinstance(value, list):
            yield f"{name}: {len(value)}" + "".join(f"<br>· {plain(each)}" for each in value[:20])
        else:
            yield f"{name}: {plain(value)}"


def plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machines(records: Iterable[Record]) -> list[str]:
    """One line for each machine that gave figures."""
    facts = {", ".join(v for v in record.where.values() if v) for record in records}
    return [*sorted(facts), ""] if facts else []

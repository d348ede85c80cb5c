"""`python -m bench.frameworks`: scripts of other frameworks under faults, Holdfast beside torchrun.

Runs in the environment of `make test-frameworks`. Results of a side and a fault that are
measured again take the place of the older ones; the page is made from all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from bench import conditions
from tests.frameworks.catalogue import EVERY, Framework, by_name

from . import table
from .faults import FAULTS, SAVE, Measured, causes, measure
from .sides import SIDES, InMemory, Preloaded, Side

PACKAGES = ("transformers", "accelerate", "trl", "peft", "lightning", "deepspeed", "torchtitan",
            "ms-swift")  # fmt: skip
OUT = Path(__file__).parents[1] / "results" / "frameworks"


def main() -> None:
    names = [one.name for one in EVERY]
    sides = {side.name: side for side in SIDES}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--sides", nargs="*", choices=list(sides), default=list(sides))
    parser.add_argument("--faults", nargs="*", choices=[*FAULTS, SAVE], default=[*FAULTS, SAVE])
    parser.add_argument("--kill-points", type=int, default=10, help="kills in a save, per side")
    parser.add_argument("--workers", type=int, default=2, help="per node; there are two nodes")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that a step waits")
    parser.add_argument("--settle", type=float, default=6.0, help="seconds of steps before a fault")
    parser.add_argument("--bound", type=float, default=150.0, help="seconds for one recovery")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # the run of a bench that is ended is ended too
        signal.signal(number, signal.default_int_handler)
    if options.page:
        write_page(options.out)
        return
    for name in options.only:
        framework = by_name(name)
        if not framework.installed:
            print(f"{name}: {framework.package} is not installed here", flush=True)
            continue
        for measured in after_each_fault(framework, [sides[one] for one in options.sides], options):
            write(options.out, measured)


def after_each_fault(
    framework: Framework, sides: list[type[Side]], options: Any
) -> Iterator[Measured]:
    """The results so far: a bench that is ended keeps them."""
    measured = Measured(
        framework=framework.name,
        conditions={**conditions.describe(), "load": table.load(), "versions": versions()},
        workers=options.workers, save_every=options.save_every, pace_s=options.pace,
        results=[], accounts=[],
    )  # fmt: skip
    for side in sides:
        if (side is Preloaded and not framework.preload) or (
            side is InMemory and not framework.memory
        ):
            continue

        def build(side: type[Side] = side) -> Side:
            place = Path(tempfile.mkdtemp(prefix="holdfast-frameworks-"))
            return side(framework, place, workers=options.workers, save_every=options.save_every,
                        pace_s=options.pace)  # fmt: skip

        wanted = causes(options.faults, options.kill_points)
        for _ in measure(measured, build, wanted, options.bound, options.settle):
            yield measured


def write(out: Path, measured: Measured) -> None:
    """The results, with those of other frameworks, sides and faults, and the page."""
    known = read(out)
    same = [one for one in known if one.framework == measured.framework]
    settings = (measured.workers, measured.save_every, measured.pace_s)
    if any((one.workers, one.save_every, one.pace_s) != settings for one in known):
        raise SystemExit(f"{out}.json has results with other settings: give another --out")
    new = {(one.side, one.fault) for one in measured.results}
    sides = {one.side for one in measured.accounts}
    merged = msgspec.structs.replace(
        measured,
        results=[r for one in same for r in one.results if (r.side, r.fault) not in new]
        + measured.results,
        accounts=[a for one in same for a in one.accounts if a.side not in sides]
        + measured.accounts,
    )
    kept = [one for one in known if one.framework != measured.framework]
    every = sorted([*kept, merged], key=lambda one: _place(one.framework))
    body = msgspec.json.format(msgspec.json.encode(every), indent=1)
    out.with_suffix(".json").write_bytes(body + b"\n")
    write_page(out)


def versions() -> str:
    """Versions of the packages in this environment."""
    found = []
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def read(out: Path) -> list[Measured]:
    file = out.with_suffix(".json")
    return msgspec.json.decode(file.read_bytes(), type=list[Measured]) if file.exists() else []


def write_page(out: Path) -> None:
    every = read(out)
    facts = dict(every[-1].conditions)
    facts["date"] = ", ".join(f"{one.framework} {one.conditions['date']}" for one in every)
    facts["load"] = ", ".join(f"{one.framework} {one.conditions['load']}" for one in every)
    of_results = [r for one in every for r in one.results]
    facts["commits"] = ", ".join(sorted({one.commit for one in of_results}))
    facts["versions"] = ", ".join(
        dict.fromkeys(part for one in every for part in one.conditions["versions"].split(", "))
    )
    del facts["commit"]
    facts |= {f"remark on {one.framework}": one.remark for one in every if one.remark}
    results = list(_flat(one.results for one in every))
    accounts = list(_flat(one.accounts for one in every))
    out.with_suffix(".md").write_text(table.page(facts, results, accounts, every[-1]))


def _flat(parts: Any) -> Iterator[Any]:
    for part in parts:
        yield from part


def _place(name: str) -> int:
    return [one.name for one in EVERY].index(name)


if __name__ == "__main__":
    main()

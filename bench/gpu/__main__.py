"""Measurements of one GPU: `python -m bench.gpu PART`, `all`, or `page`.

What a folder or the page has is not measured again, so a command that was cut off goes on. `page`
copies the records of a folder into bench/results/gpu.json and renders gpu.md from that file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import kit, page
from .parts import EVERY, PARTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all", "page"], metavar="PART")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, tiny sizes; no page")
    parser.add_argument("--minutes", type=float, help="of all parts together")
    parser.add_argument("--only", help="a part of a measurement's name")
    parser.add_argument("--again", action="store_true", help="also what the folder has")
    parser.add_argument("--list", action="store_true", help="show the order, and run nothing")
    parser.add_argument("--folder", type=Path, help="default: build/gpu, or build/gpu-rehearsal")
    given = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # lost if cut off
    folder = kit.Folder(given.folder or Path(page.folder_name(given.rehearse)))
    if not given.rehearse:
        page.unpack(folder)
    names = set(PARTS) if "all" in given.parts else set(given.parts)
    chosen = [m for m in EVERY if m.part in names and (given.only or "") in m.name]
    if given.list:
        for one in kit.in_order(chosen, folder.records(), given.rehearse):
            print(f"{one.seconds:5.0f} s  {one.part}: {one.name}")
        return 0
    if names != {"page"}:
        minutes = given.minutes or 9.0 * len(names)
        machine = kit.look()
        kit.run(
            chosen, folder, machine, minutes=minutes, rehearse=given.rehearse, again=given.again
        )
    if not given.rehearse:
        page.publish(folder)
    failed = [r for r in folder.records().values() if r.outcome == "failed" and r.part in names]
    for record in failed:
        print(f"failed: {record.part}: {record.name}: {record.why}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""One measurement in a process of its own: `python -m bench.gpu.one PART NAME RESULT SCRATCH`."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import json
import signal
import sys
from pathlib import Path

from . import kit


def main(words: list[str]) -> int:
    faulthandler.enable()
    # A measurement that takes too long cleans up behind itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the kit was cut off
    if words == ["--machine"]:
        print(json.dumps(dataclasses.asdict(kit.describe_here())))
        return 0
    from .parts import EVERY

    part, name, result, scratch = words[:4]
    (one,) = (each for each in EVERY if (each.part, each.name) == (part, name))
    skip, figures = "", {}
    try:
        figures = one.run(kit.Kit("--rehearse" in words, Path(scratch), Path(result).parents[1]))
    except kit.Skip as reason:
        skip = str(reason)
    Path(result).write_text(json.dumps({"skip": skip, "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

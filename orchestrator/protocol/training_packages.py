"""Packages that a node of a job needs beside the control plane's, found without importing torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from holdfast.orchestrator.errors import installation

OLDEST_TORCH = (2, 11)
PARTS = ("numpy", "safetensors", "xxhash", "psutil")


def problem(*more: str) -> str:
    """Message that says how to install what is missing or too old here; empty: nothing is. `more`:
    packages that are needed beside every node's."""
    oldest, torch, texts = ".".join(map(str, OLDEST_TORCH)), "torch" in more, list[str]()
    needed = (*more, *PARTS)
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        own = [name for name in missing if name not in PARTS]
        fixes = [f"pip install {' '.join(own)}"] * bool(own)
        fixes += [installation("train")] * (own != missing)
        texts.append(
            f"this Python needs {', '.join(needed)}{f' (torch {oldest} or newer)' * torch}; "
            f"missing: {', '.join(missing)}; {', and '.join(fixes)}"
        )
    spec = importlib.util.find_spec("torch") if torch else None
    if spec is not None and spec.submodule_search_locations:
        text, numbers = _torch_version(Path(spec.submodule_search_locations[0]))
        if numbers < OLDEST_TORCH:
            fix = "pip install --upgrade torch, or a newer build of its vendor"
            texts.append(f"torch: got {text}; expected {oldest} or newer; {fix}")
    return "; ".join(texts)


def _torch_version(package: Path) -> tuple[str, tuple[int, int]]:
    """Release and numbers in torch/version.py; a version of another form passes."""
    file = package / "version.py"
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    match = re.search(r"^__version__ = ['\"]((\d+)\.(\d+)[^'\"]*)", source, re.MULTILINE)
    return (match[1], (int(match[2]), int(match[3]))) if match else ("", OLDEST_TORCH)

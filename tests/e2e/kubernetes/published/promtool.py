"""Extracts promtool, the checker of Prometheus rules, from Debian's package.

Nothing is installed. Without apt-get it is left out, and the tests that need it skip. Uses only the
standard library: `make kubernetes-binaries` calls it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGE = "prometheus"
PROGRAM = "usr/bin/promtool"


def place() -> Path:
    """Path in the cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "holdfast" / "kubernetes" / "promtool"


def find() -> Path | None:
    """The one in the cache, or that of this machine."""
    ours, theirs = place(), shutil.which("promtool")
    if ours.is_file():
        return ours
    return Path(theirs) if theirs else None


def refusal() -> str | None:
    """Missing program, and the fix; None if it is there."""
    if find() is not None:
        return None
    return (
        f"promtool is neither on PATH nor in {place().parent}; install Prometheus, or run "
        "`make kubernetes-binaries` where apt-get is"
    )


def get() -> str:
    """Extract it, and describe the result."""
    there = find()
    if there is not None:
        return f"promtool is {there}"
    if missing := [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]:
        return f"promtool was left out: {' and '.join(missing)} not found"
    place().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place().parent) as scratch:
        command = ["apt-get", "download", "-q", PACKAGE]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode and os.geteuid() == 0:
            subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False)
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        packages = sorted(Path(scratch).glob("*.deb"))
        if done.returncode or not packages:
            return f"promtool was left out: apt-get download: {done.stderr.strip()[-500:]}"
        subprocess.run(["dpkg", "-x", str(packages[0]), scratch], check=True)
        (Path(scratch) / PROGRAM).rename(place())
    return f"promtool is {place()}, from {packages[0].name}"


if __name__ == "__main__":
    print(get())

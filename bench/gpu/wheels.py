"""Wheels for a machine without a network: `download` here, `install` there.

`install` names no versions, so a package that the machine has stays as it is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
WHEELS = HERE.parents[1] / "build/wheels"
MOST_BYTES = 64 * 2**20
"""Size of what may travel to the machine."""
PLATFORMS = ("manylinux1", "manylinux2014", "manylinux_2_5", "manylinux_2_12", "manylinux_2_17",
             "manylinux_2_24", "manylinux_2_27", "manylinux_2_28")  # fmt: skip


def main(words: list[str]) -> int:
    pip = [sys.executable, "-m", "pip"]
    if words == ["download"]:
        WHEELS.mkdir(parents=True, exist_ok=True)
        target = [f"--platform={platform}_x86_64" for platform in PLATFORMS]
        target += ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:"]
        order = ["download", "-q", "--no-deps", *target, "-d", str(WHEELS), "-r", str(REQUIREMENTS)]
        subprocess.run([*pip, *order], check=True)
        return expect_all()
    if words == ["install"]:
        order = ["install", "-q", "--no-index", "--find-links", str(WHEELS), *pins()]
        return expect_all() or subprocess.run([*pip, *order], check=False).returncode
    print("usage: python -m bench.gpu.wheels download | install", file=sys.stderr)
    return 2


def expect_all() -> int:
    """0 if each pinned wheel is there once, and all of them fit."""
    problems = []
    total = sum(file.stat().st_size for file in WHEELS.glob("*.whl"))
    for name, version in pins().items():
        stem = f"{name.replace('-', '_')}-{version}-"
        files = [f for f in WHEELS.glob("*.whl") if f.name.lower().startswith(stem)]
        if len(files) != 1:
            problems.append(f"{name}: got {len(files)} wheels; expected one of version {version}")
    if total > MOST_BYTES:
        problems.append(f"got {total} bytes; expected at most {MOST_BYTES}")
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    print(f"{len(pins())} wheels, {total / 2**20:.0f} MiB in {WHEELS}")
    return 1 if problems else 0


def pins() -> dict[str, str]:
    """Name -> version."""
    lines = REQUIREMENTS.read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

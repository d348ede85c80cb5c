"""Fetches the published CRDs of Kueue and the Prometheus operator.

They come from the Go module proxy and are checked against the hashes below. They are under the
Apache License 2.0, whose text is stored with them; none is kept in this repository. Uses only the
standard library: `make kubernetes-binaries` calls it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """The definitions of one project."""

    name: str
    module: str
    version: str
    hash: str
    """Hash of the module, as in go.sum."""
    folder: str
    files: tuple[str, ...]


PINS = (
    Published(
        "kueue",
        "sigs.k8s.io/kueue",
        "v0.19.2",
        "h1:mPNzr37u0nwI7ikST5QQl5gg6EgtYOAvC9ZbTgywdN8=",
        "config/components/crd/bases",
        (
            "kueue.x-k8s.io_clusterqueues.yaml",
            "kueue.x-k8s.io_localqueues.yaml",
            "kueue.x-k8s.io_resourceflavors.yaml",
            "kueue.x-k8s.io_workloadpriorityclasses.yaml",
        ),
    ),
)
"""Gang schedulers and queues."""
MONITORING = Published(
    "prometheus-operator",
    "github.com/prometheus-operator/prometheus-operator",
    "v0.85.0",
    "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
    "example/prometheus-operator-crd",
    (
        "monitoring.coreos.com_podmonitors.yaml",
        "monitoring.coreos.com_prometheusrules.yaml",
        "monitoring.coreos.com_servicemonitors.yaml",
    ),
)
ALL = (*PINS, MONITORING)


class GetError(Exception):
    """An error message for the user."""


def cache() -> Path:
    """The cache directory for the current pins."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(repr(ALL).encode()).hexdigest()[:16]
    return home / "holdfast" / "kubernetes" / f"published-{key}"


def refusal() -> str | None:
    """Missing binaries, and the fix; None if all are there."""
    if cache().is_dir():
        return None
    return (
        f"the published CRDs are not in {cache()}; run `make kubernetes-binaries` once, or "
        f"`python {Path(__file__).relative_to(Path(__file__).parents[4])}`: it needs Go and its "
        f"module proxy"
    )


def files(pin: Published) -> list[Path]:
    return [cache() / pin.name / name for name in pin.files]


def get() -> Path:
    target = cache()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        whole = Path(scratch) / "published"
        for pin in ALL:
            module = _download(pin, scratch)
            folder = whole / pin.name
            folder.mkdir(parents=True)
            for name in pin.files:
                shutil.copy(module / pin.folder / name, folder / name)
            shutil.copy(module / "LICENSE", folder / "LICENSE")
        whole.rename(target)
    return target


def _download(pin: Published, directory: str) -> Path:
    if shutil.which("go") is None:
        raise GetError("`go` was not found on PATH; it fetches the published CRDs")
    done = subprocess.run(
        ["go", "mod", "download", "-json", f"{pin.module}@{pin.version}"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout or "{}")
    if done.returncode or found.get("Error"):
        raise GetError(f"{pin.module}: {found.get('Error') or done.stderr.strip()}")
    if found["Sum"] != pin.hash:
        raise GetError(f"{pin.module} {pin.version}: got {found['Sum']}, expected {pin.hash}")
    return Path(found["Dir"])


def main() -> int:
    try:
        print(f"The published CRDs are in {get()}")
    except GetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

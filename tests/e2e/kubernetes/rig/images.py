"""Writes images as archives of OCI layouts, without a container engine.

Images are laid out from images/files.yaml. The layer holds the files of Holdfast; the node mounts
the system, Python and the libraries from this machine, read-only. So little is copied, and pods
need no volumes that a real cluster would not give them. test_images.py runs whole images.
"""

from __future__ import annotations

import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

from holdfast.orchestrator.limits import RELEASE
from images import build
from images.build import PREFIX, Layer
from tests.e2e.kubernetes.rig.run import REPOSITORY

PAUSE = "holdfast.test/pause:rig"
REGISTRY = "docker.io"  # the default registry
LIBRARIES = f"{PREFIX}/libraries"


def image(role: str) -> str:
    """The image name of a role, as in the chart."""
    return f"holdfast/{role}:{RELEASE}"


def binds() -> dict[str, Path]:
    """Path in the container -> directory of this machine."""
    found = {"/usr": Path("/usr"), LIBRARIES: Path(sysconfig.get_path("purelib"))}
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        found[str(base)] = base
    return found


def add_package(layer: Layer, source: Path, place: str) -> None:
    """Add a package. Bytecode contains the time of its source, so all files keep their times."""
    for path in source.rglob("*"):
        if path.is_file():
            status = path.stat()
            inside = f"{place}/{path.relative_to(source)}"
            layer.file(inside, path.read_bytes(), status.st_mode & 0o777, status.st_mtime)


def write_archive(path: Path, reference: str, layer: Layer, config: dict[str, Any]) -> None:
    """An archive of one layer, as `ctr images import` reads it."""
    layout = path.with_suffix("")
    build.write_layout(layout, [(layer, 1)], config, reference)
    with tarfile.open(path, "w") as archive:
        archive.add(layout, "")


def write_pause(path: Path, program: Path) -> None:
    layer = Layer()
    layer.file("pause", program.read_bytes(), 0o755)
    for place in binds():  # the node binds them into every container
        layer.directory(place)
    config = {"Entrypoint": ["/pause"], "User": "65535:65535", "WorkingDir": "/"}
    write_archive(path, PAUSE, layer, config)


def write_holdfast(path: Path, role: str) -> None:
    """The image of the operator or of a worker."""
    facts = build.FACTS["images"][role]
    layer = build.system_layer([])
    for name in binds():
        layer.directory(name)
    environment(layer)
    packages = f"{PREFIX}/lib/python{sysconfig.get_python_version()}/site-packages"
    for name in facts["packages"]:
        # holdfast/ links to the folders beside it, and pip installs them as packages of it.
        inside = "holdfast" if name == "holdfast" else f"holdfast/{name}"
        add_package(layer, REPOSITORY / name, f"{packages}/{inside}")
    write_archive(path, f"{REGISTRY}/{image(role)}", layer, build.config(role))


def environment(layer: Layer) -> None:
    """A virtual environment of the host's Python, with the libraries in another directory."""
    python = Path(sys.base_prefix).resolve() / "bin" / "python3"
    layer.link(f"{PREFIX}/bin/python", str(python))
    layer.file(f"{PREFIX}/pyvenv.cfg", f"home = {python.parent}\n".encode())
    packages = f"{PREFIX}/lib/python{sysconfig.get_python_version()}/site-packages"
    layer.file(f"{packages}/libraries.pth", f"{LIBRARIES}\n".encode())

"""Writes images as archives of OCI layouts, without a container engine.

Images are laid out from images/files.yaml. The layer holds the files of Holdfast; the node mounts
the system, Python and the libraries from this machine, read-only. So little is copied, pods need no
volumes that a real cluster would not give them, and a package that is missing in the list is
missing here too.
"""

from __future__ import annotations

import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import yaml

from images import build
from images.build import PREFIX, Layer
from tests.e2e.kubernetes.rig.run import REPOSITORY

CHART = REPOSITORY / "helm" / "holdfast" / "Chart.yaml"
PAUSE = "holdfast.test/pause:rig"
REGISTRY = "docker.io"  # the default registry
LIBRARIES = f"{PREFIX}/libraries"
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
DIRECTORIES = ("dev", "etc", "mnt", "proc", "root", "run", "sys", "usr", "var")


def image(role: str) -> str:
    """The image name of a role, as in the chart."""
    return f"holdfast/{role}:{yaml.safe_load(CHART.read_text())['appVersion']}"


def binds() -> dict[str, Path]:
    """Path in the container -> directory of this machine."""
    found = {"/usr": Path("/usr"), LIBRARIES: Path(sysconfig.get_path("purelib"))}
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        found[str(base)] = base
    return found


def add_package(layer: Layer, source: Path, place: str) -> None:
    """Add the modules of a package, their bytecode and its data, as pip installs them.

    Bytecode contains the time and size of its source, so both keep their times.
    """
    data = package_data()
    for path in source.rglob("*"):
        if path.suffix in (".py", ".pyc") or path.resolve() in data:
            status = path.stat()
            inside = f"{place}/{path.relative_to(source)}"
            layer.file(inside, path.read_bytes(), status.st_mode & 0o777, status.st_mtime)


def package_data() -> set[Path]:
    """The files that pyproject.toml lists for pip beside the modules."""
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    return {
        path.resolve()
        for package, patterns in listed["package-data"].items()
        for pattern in patterns
        for path in REPOSITORY.joinpath(*package.split(".")).glob(pattern)
        if path.is_file()
    }


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
    layer = Layer()
    for name in (*DIRECTORIES, *binds(), facts["workdir"]):
        if name != "/tmp":
            layer.directory(name)
    layer.directory("tmp", 0o1777)
    for name, target in LINKS.items():
        if Path(f"/{name}").is_symlink():
            layer.link(name, target)
    layer.file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
    layer.file("etc/group", b"root:x:0:\n")
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
    layer.directory(f"{PREFIX}/bin")
    layer.link(f"{PREFIX}/bin/python", str(python))
    layer.file(f"{PREFIX}/pyvenv.cfg", f"home = {python.parent}\n".encode())
    packages = f"{PREFIX}/lib/python{sysconfig.get_python_version()}/site-packages"
    layer.directory(packages)
    layer.file(f"{packages}/libraries.pth", f"{LIBRARIES}\n".encode())

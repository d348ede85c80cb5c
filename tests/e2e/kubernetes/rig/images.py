"""Writes images as docker archives, without a container engine.

Images are laid out from images/files.yaml and the last stage of each Dockerfile. The layer holds
the files of Holdfast; the node mounts the system, Python and the libraries from this machine,
read-only. So little is copied, pods need no volumes that a real cluster would not give them, and a
file that is missing in the list is missing here too.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import shlex
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.kubernetes.rig.run import REPOSITORY

CHART = REPOSITORY / "helm" / "holdfast" / "Chart.yaml"
IMAGES = REPOSITORY / "images"
PAUSE = "holdfast.test/pause:rig"
REGISTRY = "docker.io"  # the default registry
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

PREFIX = "/opt/holdfast"  # the virtual environment of the Dockerfiles
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


class Layer:
    """A tar file in memory whose entries belong to root."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._bytes, mode="w")
        self._known: set[str] = set()

    def directory(self, path: str, mode: int = 0o755) -> None:
        parts = path.strip("/").split("/")
        for end in range(1, len(parts) + 1):
            name = "/".join(parts[:end])
            if name in self._known:
                continue
            self._known.add(name)
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE
            entry.mode = mode if end == len(parts) else 0o755
            self._tar.addfile(entry)

    def link(self, path: str, target: str) -> None:
        entry = tarfile.TarInfo(path.strip("/"))
        entry.type = tarfile.SYMTYPE
        entry.linkname = target
        self._tar.addfile(entry)

    def file(self, path: str, content: bytes, mode: int = 0o644, changed_s: float = 0) -> None:
        entry = tarfile.TarInfo(path.strip("/"))
        entry.size = len(content)
        entry.mode = mode
        entry.mtime = int(changed_s)
        self._tar.addfile(entry, io.BytesIO(content))

    def package(self, source: Path, place: str) -> None:
        """Add the modules of a package, their bytecode and its data, as pip installs them.

        Bytecode contains the time and size of its source, so both keep their times.
        """
        data = package_data()
        for path in sorted(source.rglob("*")):
            if path.suffix in (".py", ".pyc") or path.resolve() in data:
                inside = f"{place}/{path.relative_to(source)}"
                self.directory(str(Path(inside).parent))
                status = path.stat()
                self.file(inside, path.read_bytes(), status.st_mode & 0o777, status.st_mtime)

    def finish(self) -> bytes:
        self._tar.close()
        return self._bytes.getvalue()


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


def write_archive(path: Path, reference: str, layer: bytes, config: dict[str, Any]) -> None:
    """A docker archive of one layer, as `docker save` writes it and `ctr images import` reads."""
    document = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    encoded = json.dumps(document, sort_keys=True).encode()
    name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": ["layer.tar"]}]
    outer = Layer()
    outer.file("layer.tar", layer)
    outer.file(name, encoded)
    outer.file("manifest.json", json.dumps(manifest).encode())
    path.write_bytes(outer.finish())


def write_pause(path: Path, program: Path) -> None:
    layer = Layer()
    layer.file("pause", program.read_bytes(), 0o755)
    for place in binds():  # the node binds them into every container
        layer.directory(place)
    config = {"Entrypoint": ["/pause"], "User": "65535:65535", "WorkingDir": "/"}
    write_archive(path, PAUSE, layer.finish(), config)


def write_holdfast(path: Path, role: str) -> None:
    """The image of the operator or of a worker."""
    listed = yaml.safe_load((IMAGES / "files.yaml").read_text())[role]
    stage = last_stage((IMAGES / role / "Dockerfile").read_text())
    layer = Layer()
    for name in (*DIRECTORIES, *binds(), stage["WORKDIR"]):
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
    for entry in listed["files"]:
        source = REPOSITORY / entry["from"]
        if (source / "__init__.py").exists():
            # holdfast/ links to the folders beside it, and pip installs them as packages of it.
            inside = "holdfast" if source.name == "holdfast" else f"holdfast/{source.name}"
            layer.package(source, f"{packages}/{inside}")
    config = {
        "User": str(listed["user"]),
        "Entrypoint": listed["entrypoint"],
        "WorkingDir": stage["WORKDIR"],
        "Env": shlex.split(stage["ENV"]),
        **({"Cmd": json.loads(stage["CMD"])} if "CMD" in stage else {}),
    }
    write_archive(path, f"{REGISTRY}/{image(role)}", layer.finish(), config)


def environment(layer: Layer) -> None:
    """A virtual environment of the host's Python, with the libraries in another directory."""
    python = Path(sys.base_prefix).resolve() / "bin" / "python3"
    layer.directory(f"{PREFIX}/bin")
    layer.link(f"{PREFIX}/bin/python", str(python))
    layer.file(f"{PREFIX}/pyvenv.cfg", f"home = {python.parent}\n".encode())
    packages = f"{PREFIX}/lib/python{sysconfig.get_python_version()}/site-packages"
    layer.directory(packages)
    layer.file(f"{packages}/libraries.pth", f"{LIBRARIES}\n".encode())


def last_stage(dockerfile: str) -> dict[str, str]:
    """Instruction -> arguments, of the last stage."""
    text = re.sub(r"\\\n", " ", dockerfile)
    stage: dict[str, str] = {}
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stage = {}
        elif word and not word.startswith("#"):
            stage[word] = rest.strip()
    return stage

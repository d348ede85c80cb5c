"""Images without an engine: docker archives written by hand.

Owns the bytes of the images and the list of what a node lays into them. The images of Holdfast
hold empty directories and links; the directories of this machine that an image would hold (the
system, the virtual environment, the repository) are bound into all containers, read-only, by the
node. So nothing is copied, and a pod needs no volumes that a real cluster would not give it. They
go by the names that the chart gives to pods when nobody says otherwise.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.kubernetes.rig.run import REPOSITORY

CHART = REPOSITORY / "helm" / "holdfast" / "Chart.yaml"
PAUSE = "holdfast.test/pause:rig"
REGISTRY = "docker.io"  # what a name without a registry means
USER = 65532
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PASSWD = f"root:x:0:0:root:/root:/bin/sh\nholdfast:x:{USER}:{USER}::/home/holdfast:/bin/sh\n"
GROUP = f"root:x:0:\nholdfast:x:{USER}:\n"
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
DIRECTORIES = ("dev", "etc", "home/holdfast", "mnt", "proc", "root", "run", "sys", "usr", "var")


def image(role: str) -> str:
    """The name of the image of the operator or of a worker."""
    return f"holdfast/{role}:{yaml.safe_load(CHART.read_text())['appVersion']}"


def host_directories() -> list[Path]:
    """What the image would hold and takes from this machine, outermost first."""
    wanted = [Path("/usr"), REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]
    found: list[Path] = []
    for path in sorted({path.resolve() for path in wanted}):
        if not any(path.is_relative_to(outer) for outer in found):
            found.append(path)
    return found


class Layer:
    """A tar file in memory whose entries belong to root and carry no times."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._bytes, mode="w")
        self._known: set[str] = set()

    def directory(self, path: str, mode: int = 0o755) -> None:
        parts = path.split("/")
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
        entry = tarfile.TarInfo(path)
        entry.type = tarfile.SYMTYPE
        entry.linkname = target
        self._tar.addfile(entry)

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        entry = tarfile.TarInfo(path)
        entry.size = len(content)
        entry.mode = mode
        self._tar.addfile(entry, io.BytesIO(content))

    def finish(self) -> bytes:
        self._tar.close()
        return self._bytes.getvalue()


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
    for directory in host_directories():  # the node binds them into every container
        layer.directory(str(directory).lstrip("/"))
    config = {"Entrypoint": ["/pause"], "User": f"{USER}:{USER}", "WorkingDir": "/"}
    write_archive(path, PAUSE, layer.finish(), config)


def write_holdfast(path: Path, role: str) -> None:
    layer = Layer()
    for name in (*DIRECTORIES, *(str(d).lstrip("/") for d in host_directories())):
        layer.directory(name)
    layer.directory("tmp", 0o1777)
    for name, target in LINKS.items():
        if Path(f"/{name}").is_symlink():
            layer.link(name, target)
    layer.file("etc/passwd", PASSWD.encode())
    layer.file("etc/group", GROUP.encode())
    config = {
        "User": f"{USER}:{USER}",
        "WorkingDir": str(REPOSITORY),
        "Env": [f"PATH={Path(sys.prefix) / 'bin'}:/usr/bin:/bin", "HOME=/home/holdfast"],
        **({"Entrypoint": ["holdfast"]} if role == "operator" else {}),
    }
    write_archive(path, f"{REGISTRY}/{image(role)}", layer.finish(), config)

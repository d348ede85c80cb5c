"""The images of the nodes: those of `make images`, as archives, without torch's own layer.

Torch has 3 GB, and a wheel for CPUs alone is not on the package index: nodes mount it from this
machine's environment, read-only. test_images.py pulls and runs the whole images. What was built
and unpacked is kept in build/images for the next run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.orchestrator.limits import RELEASE
from images import build
from images.build import PREFIX, Layer, Written
from tests.e2e.kubernetes.rig.binaries import (
    CONTROL_PLANE,
    NODE,
    Binaries,
    locate,
    machine_refusal,
)
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.run import Run

PAUSE = "holdfast.test/pause:rig"
LIBRARIES = f"{PREFIX}/libraries"
TORCH = ("torch", "torch-*", "torchgen", "functorch", "triton", "triton-*", "nvidia", "cuda")
CACHE = build.ROOT / "build" / "images"
UNPACKING = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{socket}"
"""


def image(role: str) -> str:
    """The image name of a role, as in the chart."""
    return f"registry.invalid/holdfast/{role}:{RELEASE}"


def binds() -> dict[str, Path]:
    """Path in the container -> directory of this machine, of torch and its libraries.

    In the environment of other frameworks, which no image has, the path of all libraries.
    """
    libraries = Path(sysconfig.get_path("purelib"))
    if (libraries / "transformers").exists():
        return {LIBRARIES: libraries}
    places = [place for pattern in TORCH for place in sorted(libraries.glob(pattern))]
    return {f"{LIBRARIES}/{place.name}": place for place in places}


def write_archive(
    path: Path, reference: str, layers: list[Layer | Written], config: dict[str, Any]
) -> None:
    """An archive as `ctr images import` reads it."""
    layout = path.with_suffix("")
    build.write_layout(layout, [(layer, 1) for layer in layers], config, reference)
    with tarfile.open(path, "w") as archive:
        archive.add(layout, "")


def mount_points() -> Layer:
    """The directories that nodes mount into every container, and where Python finds them."""
    layer = Layer()
    for place in binds():
        layer.directory(place)
    layer.file(f"{build.PACKAGES}/libraries.pth", f"{LIBRARIES}\n".encode())
    return layer


def write_pause(path: Path, program: Path) -> None:
    layer = mount_points()
    layer.file("pause", program.read_bytes(), 0o755)
    config = {"Entrypoint": ["/pause"], "User": "65535:65535", "WorkingDir": "/"}
    write_archive(path, PAUSE, [layer], config)


def unpacked(run: Run, binaries: Binaries, *, holdfast: bool) -> Path:
    """A root of containerd that nodes share: the image of pauses and, if wanted, Holdfast's."""
    archives = run.directory / "images"
    archives.mkdir()
    write_pause(archives / "pause.tar", binaries.path("pause"))
    root = run.directory / "unpacked"
    if not holdfast:
        unpack(run, binaries, archives, root)
        return root
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        write_holdfast(archives)
        unpack(run, binaries, archives, CACHE / "unpacked", mounted=image("operator"))
        shutil.copytree(CACHE / "unpacked", root, symlinks=True, copy_function=link)
    return root


def link(source: str, target: str) -> None:
    """Link a file of a layer, which never changes; copy a database."""
    if not source.endswith(".db"):
        try:
            os.link(source, target)
            return
        except OSError:  # on another file system
            pass
    shutil.copy2(source, target)


def unpack(run: Run, binaries: Binaries, archives: Path, root: Path, mounted: str = "") -> None:
    """Fill `root` from archives, and note the layers of the image `mounted` in root/layers."""
    socket = archives / "socket"
    config = archives / "containerd.toml"
    config.write_text(UNPACKING.format(root=root, state=archives / "state", socket=socket))
    private = ("unshare", "--mount", "--propagation=private")
    server = Server(run, "unpacking", [*private, binaries.path("containerd"), f"--config={config}"])
    server.start()
    ctr = (binaries.path("ctr"), f"--address={socket}", "--namespace=k8s.io")
    server.wait_ready(
        lambda: subprocess.run([*ctr, "version"], capture_output=True).returncode == 0, timeout_s=20
    )
    for archive in sorted(archives.glob("*.tar")):
        subprocess.check_output([*ctr, "images", "import", archive])
    if mounted:
        view = archives / "view"
        view.mkdir()
        subprocess.check_output([*ctr, "images", "mount", mounted, view])
        lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        options = next(fields[-1] for fields in lines if fields[4] == str(view)).split(",")
        lower = next(option for option in options if option.startswith("lowerdir="))
        (root / "layers").write_text(lower.replace(f"{root}/", ""))
        subprocess.check_output([*ctr, "images", "unmount", "--rm", view])
    server.end()


def lower_directories(root: Path) -> str:
    """The overlay's option that names the layers of the operator's image below `root`."""
    places = (root / "layers").read_text().removeprefix("lowerdir=").split(":")
    return "lowerdir=" + ":".join(f"{root / place}" for place in places)


def write_holdfast(directory: Path) -> None:
    """The images of operator and worker, with the code of this checkout."""
    with tempfile.TemporaryDirectory() as dist:
        holdfast = build.distributions(Path(dist))
        for role in build.ROLES:
            layers = [*lower_layers(role), build.own_layer(role, holdfast), mount_points()]
            write_archive(directory / f"{role}.tar", image(role), layers, build.config(role))


def lower_layers(role: str) -> list[Written]:
    """The layers of Debian's packages and of wheels, from the last run if nothing has changed."""
    lock = build.ROOT / "images" / role / "requirements.txt"
    sources = (Path(build.__file__), build.ROOT / "images" / "files.yaml", lock)
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    place = CACHE / "layers" / f"{role}-{key}"
    index = place / "index.json"
    if not index.exists():
        place.mkdir(parents=True, exist_ok=True)
        wheels = build.wheels(build.lock_parts(lock)[1], CACHE / role / "wheels")
        system = build.system_layer(build.debian_packages(role, CACHE / role))
        written = [layer.write(place, 1) for layer in (system, build.wheel_layer(wheels))]
        index.write_text(json.dumps(written))
    return [
        Written(place / descriptor["digest"].removeprefix("sha256:"), descriptor, content)
        for descriptor, content in json.loads(index.read_text())
    ]


if __name__ == "__main__":  # before the tests: it may take longer than one of them
    if refusal := machine_refusal() or locate().refusal((*CONTROL_PLANE, *NODE)):
        print(f"no images for tests on nodes: {refusal}")
    else:
        with ProcessPoolExecutor() as processes:
            list(processes.map(lower_layers, build.ROLES))

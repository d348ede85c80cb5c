"""Builds the images without a base image and without a container engine: Debian packages and wheels
go file by file into the layers of an OCI layout, each with a software bill of materials.

The same packages and commit give the same digest: no file has a time, and bytecode has no
references that depend on the process that wrote it.
"""

from __future__ import annotations

import argparse
import configparser
import functools
import hashlib
import importlib.util
import io
import json
import marshal
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).parents[1]
FACTS = yaml.safe_load((ROOT / "images" / "files.yaml").read_text())
ROLES = tuple(FACTS["images"])
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PREFIX = "/opt/holdfast"
PYTHON = (3, 11)  # Debian's
PACKAGES = f"{PREFIX}/lib/python3.11/site-packages"
MERGED = ("bin", "lib", "lib64", "sbin")  # links into usr, which a package need not know
TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")  # wheels with a layer of their own
UNUSED = re.compile(
    r"usr/share/(bug|info|lintian|locale|man)(/|$)|usr/share/doc/.*/(?!copyright)[^/]+$"
)
OWN = {
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n",
    f"{PREFIX[1:]}/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = false\n",
}
DEBIAN_SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
SCRIPT = "#!{prefix}/bin/python\nimport sys\nfrom {module} import {name}\nsys.exit({call}())\n"


Content = bytes | Callable[[], bytes | None]
"""Bytes, or what reads them when the layer is written; None leaves the file out."""


class BuildError(Exception):
    """Something is missing; the text has the fix."""


def run(*words: str | Path, wanted: str, package: str = "", cwd: Path = ROOT) -> bytes:
    """Run a program; `wanted` says what it is for, `package` which package of Debian has it."""
    if shutil.which(str(words[0])) is None:
        how = f"apt install {package}" if package else "make install"
        raise BuildError(f"{words[0]}: not installed, needed {wanted}; {how}")
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, check=False)
    if done.returncode:
        text = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise BuildError(
            f"{Path(words[0]).name}, {wanted}: exit code {done.returncode}: {text[-1500:]}"
        )
    return done.stdout


def epoch() -> int:
    """The time of everything that must have one: SOURCE_DATE_EPOCH, or that of the last commit."""
    if text := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(text)
    return int(run("git", "log", "-1", "--format=%ct", wanted="for the time", package="git"))


# -- sources -----------------------------------------------------------------------------------
def debian_packages(role: str, work: Path) -> list[Path]:
    """The role's packages with all that they depend on, downloaded and verified by apt."""
    sources = [path for name in DEBIAN_SOURCES if (path := Path(name)).exists()]
    if not sources:
        raise BuildError(f"none of {', '.join(DEBIAN_SOURCES)} exists; build on Debian 12")
    apt = work / "apt"
    for name in ("lists/partial", f"{role}/partial", "sources"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "installed").touch()
    shutil.copy(sources[0], apt / "sources")
    places = {
        "Dir::Etc::sourcelist": "/dev/null", "Dir::Etc::sourceparts": apt / "sources",
        "Dir::State::lists": apt / "lists", "Dir::State::status": apt / "installed",
        "Dir::Cache": apt, "Dir::Cache::archives": apt / role,
        "APT::Sandbox::User": "root", "APT::Install-Recommends": "false",
        "Debug::NoLocking": "true", "Acquire::Retries": "1",
    }  # fmt: skip
    options = [f"-o{key}={value}" for key, value in places.items()]
    get = functools.partial(run, "apt-get", *options, package="apt")
    get("--error-on=any", "update", wanted="to read Debian's package lists (network needed)")
    for old in (apt / role).glob("*.deb"):
        old.unlink()
    own = FACTS["images"][role]["debian"]
    wanted = f"to download Debian {FACTS['suite']} packages (network needed)"
    get("install", "--yes", "--download-only", *FACTS["debian"], *own, wanted=wanted)
    left_out = set(FACTS["without"]) - set(own)
    return [p for p in sorted((apt / role).glob("*.deb")) if p.name.split("_")[0] not in left_out]


def lock_parts(lock: Path) -> tuple[str, str]:
    """The lines of torch with its libraries, and all others."""
    entries = re.split(r"^(?=\w)", lock.read_text(), flags=re.MULTILINE)
    torch = [entry for entry in entries if TORCH.match(entry)]
    return "".join(torch), "".join(entry for entry in entries if entry not in torch)


def wheels(lock: str, place: Path) -> list[Path]:
    """The wheels of a lock, verified by pip against its hashes and kept for the next build."""
    place /= hashlib.sha256(lock.encode()).hexdigest()[:16]
    if not place.exists():
        shutil.rmtree(place.parent, ignore_errors=True)
        partial = place.with_name("partial")
        partial.mkdir(parents=True)
        file = partial / "requirements.txt"
        file.write_text(lock)
        pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--require-hashes")
        wanted = f"to download wheels of {place.parent.name} (network needed)"
        run(*pip, "--only-binary", ":all:", "--dest", partial, "--requirement", file, wanted=wanted)
        partial.rename(place)
    return sorted(place.glob("*.whl"))


def distributions(out: Path, *, sdist: bool = False) -> Path:
    """Build the wheel of the files that git knows; returns its path. Leaves nothing in the tree."""
    names = run(
        "git", "ls-files", "-co", "--exclude-standard", wanted="to list files", package="git"
    )
    with tempfile.TemporaryDirectory() as directory:
        for name in names.decode().splitlines():
            source, target = ROOT / name, Path(directory) / name
            if source.exists() and not name.startswith(("tests/", "bench/", "docs/")):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        kinds = ("wheel", "sdist")[: 1 + sdist]
        calls = "; ".join(f"backend.build_{kind}({str(out)!r})" for kind in kinds)
        code = f"import setuptools.build_meta as backend; {calls}"
        run(sys.executable, "-c", code, wanted="to build the wheel", cwd=Path(directory))
    (wheel,) = out.glob("*.whl")
    return wheel


# -- layers ------------------------------------------------------------------------------------
class Layer:
    """A tar file whose entries belong to root and have no time, unless a file needs one."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[tarfile.TarInfo, Content]] = {}

    def file(self, path: str, content: Content, mode: int = 0o644, changed_s: float = 0) -> None:
        entry = tarfile.TarInfo(path.strip("/"))
        entry.mode, entry.mtime = mode, int(changed_s)
        self.entries[entry.name] = entry, content

    def link(self, path: str, target: str) -> None:
        self.file(path, b"", 0o777)
        entry, _ = self.entries[path.strip("/")]
        entry.type, entry.linkname = tarfile.SYMTYPE, target

    def directory(self, path: str, mode: int = 0o755) -> None:
        self.file(path, b"", mode)
        self.entries[path.strip("/")][0].type = tarfile.DIRTYPE

    def debian(self, package: Path) -> None:
        data = run("dpkg-deb", "--fsys-tarfile", package, wanted="to unpack", package="dpkg")
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for entry in tar:
                path = merged(entry.name.removeprefix("./").strip("/"))
                if not path or path in MERGED or UNUSED.match(path):
                    continue
                if entry.isdir():
                    self.directory(path, entry.mode)
                elif entry.issym():
                    self.link(path, entry.linkname)
                elif content := tar.extractfile(entry):  # a hard link becomes a file of its own
                    self.file(path, content.read(), entry.mode & 0o755)

    def wheel(self, wheel: Path, leave_out: Sequence[str] = ()) -> None:
        """Add a wheel as pip installs it, with bytecode."""
        archive = zipfile.ZipFile(wheel)
        for info in archive.infolist():
            if info.is_dir() or info.filename.startswith(tuple(leave_out)):
                continue
            mode = 0o755 if info.external_attr >> 16 & 0o111 else 0o644
            inside = re.match(r"[^/]+\.data/(\w+)/(.*)", info.filename)
            kind, name = inside.groups() if inside else ("purelib", info.filename)
            content = functools.partial(archive.read, info.filename)
            if kind == "scripts":
                self.file(f"{PREFIX}/bin/{name}", functools.partial(script, content), 0o755)
            elif kind in ("purelib", "platlib"):
                self.file(f"{PACKAGES}/{name}", content, mode)
                if name.endswith(".py"):
                    place, _, module = f"{PACKAGES}/{name}".rpartition("/")
                    target = f"{place}/__pycache__/{module[:-3]}.cpython-311.pyc"
                    self.file(target, functools.partial(bytecode, f"{place}/{module}", content))
            elif kind == "data":
                self.file(f"{PREFIX}/{name}", content, mode)
            if name.endswith(".dist-info/entry_points.txt"):
                for command, text in console_scripts(content().decode()).items():
                    self.file(f"{PREFIX}/bin/{command}", text, 0o755)

    def write(self, blobs: Path, level: int) -> tuple[dict[str, Any], str]:
        """Write the compressed layer; returns its descriptor and the digest of its content."""
        for path in list(self.entries):
            for parent in map(str, Path(path).parents[:-1]):
                if parent not in self.entries:
                    self.directory(parent)
        blob = Blob(blobs, level)
        with tarfile.open(fileobj=cast(Any, blob), mode="w|", format=tarfile.GNU_FORMAT) as tar:
            for _, (entry, content) in sorted(self.entries.items(), key=lambda item: item[0]):
                data = content if isinstance(content, bytes) else content()
                if data is not None:
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
        return blob.close("application/vnd.oci.image.layer.v1.tar+gzip")


@dataclass
class Written:
    """A layer that another build wrote."""

    blob: Path
    descriptor: dict[str, Any]
    content: str
    entries = True

    def write(self, blobs: Path, level: int) -> tuple[dict[str, Any], str]:
        shutil.copy(self.blob, blobs)
        return self.descriptor, self.content


class Blob:
    """A file that is compressed and named by its digest while it is written."""

    def __init__(self, blobs: Path, level: int) -> None:
        self._path = blobs / "partial"
        self._file = self._path.open("wb")
        self._gzip = zlib.compressobj(level, wbits=31)
        self._content, self._written = hashlib.sha256(), hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._content.update(data)
        self._put(self._gzip.compress(data))
        return len(data)

    def _put(self, data: bytes) -> None:
        self._written.update(data)
        self._file.write(data)

    def close(self, media_type: str) -> tuple[dict[str, Any], str]:
        self._put(self._gzip.flush())
        self._file.close()
        digest, size = self._written.hexdigest(), self._path.stat().st_size
        self._path.rename(self._path.with_name(digest))
        named = {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}
        return named, f"sha256:{self._content.hexdigest()}"


def merged(path: str) -> str:
    return f"usr/{path}" if path.split("/")[0] in MERGED and "/" in path else path


def bytecode(path: str, source: Callable[[], bytes]) -> bytes | None:
    """Unchecked bytecode; None for a template or a module of another Python.

    Version 2 of marshal writes no references, which differ between runs.
    """
    text = source()
    try:
        code = compile(text, path, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):
        return None
    header = importlib.util.MAGIC_NUMBER + (0b01).to_bytes(4, "little")
    return header + importlib.util.source_hash(text) + marshal.dumps(code, 2)


def script(content: Callable[[], bytes]) -> bytes:
    return re.sub(rb"^#!python.*", f"#!{PREFIX}/bin/python".encode(), content(), count=1)


def console_scripts(text: str) -> dict[str, bytes]:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    scripts: dict[str, bytes] = {}
    for command, target in parser.items("console_scripts") if "console_scripts" in parser else ():
        module, _, call = target.split("[")[0].strip().partition(":")
        first = call.split(".")[0]
        words = {"prefix": PREFIX, "module": module, "name": first, "call": call}
        scripts[command] = SCRIPT.format(**words).encode()
    return scripts


# -- images ------------------------------------------------------------------------------------
def system_layer(packages: Iterable[Path]) -> Layer:
    layer = Layer()
    for name in MERGED:
        layer.directory(f"usr/{name}")
        layer.link(name, f"usr/{name}")
    for name in ("dev", "etc", "home", "proc", "root", "run", "sys", "var/tmp", "workspace"):
        layer.directory(name)
    layer.directory("tmp", 0o1777)
    for path, text in OWN.items():
        layer.file(path, text.encode())
    layer.link(f"{PREFIX}/bin/python", "/usr/bin/python3.11")
    for package in packages:
        layer.debian(package)
    trusted = "usr/share/ca-certificates/"
    certificates = [
        c
        for p, (_, c) in sorted(layer.entries.items(), key=lambda e: e[0])
        if p.startswith(trusted)
    ]
    authorities = b"".join(text for text in certificates if isinstance(text, bytes))
    if authorities:
        layer.file("etc/ssl/certs/ca-certificates.crt", authorities)
    return layer


def wheel_layer(paths: Iterable[Path], leave_out: Sequence[str] = ()) -> Layer:
    layer = Layer()
    for wheel in paths:
        layer.wheel(wheel, leave_out)
    return layer


def own_layer(role: str, holdfast: Path) -> Layer:
    absent = {"orchestrator", "workers"} - set(FACTS["images"][role]["packages"])
    return wheel_layer([holdfast], [f"holdfast/{name}/" for name in absent])


def write_image(
    role: str, debian: list[Path], torch: list[Path], rest: list[Path], holdfast: Path, out: Path
) -> str:
    """Write one image as an OCI layout, with its bill of materials; returns its digest."""
    version = holdfast.name.split("-")[1]
    layers = [
        (system_layer(debian), 6),
        (wheel_layer(torch), 1),
        (wheel_layer(rest), 6),
        (own_layer(role, holdfast), 6),
    ]
    description = FACTS["images"][role]["description"]
    labels = {"title": f"holdfast {role}", "description": description, "version": version}
    labels = {f"org.opencontainers.image.{key}": text for key, text in labels.items()}
    digest = write_layout(out / role, layers, {**config(role), "Labels": labels}, version)
    parts = [*debian, *sorted([*torch, *rest]), holdfast]
    (out / f"{role}.cdx.json").write_text(json.dumps(materials(role, version, parts), indent=1))
    return digest


def write_layout(
    layout: Path, layers: Iterable[tuple[Layer | Written, int]], config: dict[str, Any], name: str
) -> str:
    """Write layers, each with its level of compression, as an OCI layout; returns its digest."""
    shutil.rmtree(layout, ignore_errors=True)
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    written = [layer.write(blobs, level) for layer, level in layers if layer.entries]
    created = datetime.fromtimestamp(epoch(), UTC)
    document = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "created": created.isoformat().replace("+00:00", "Z"),
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [content for _, content in written]},
    }
    media = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{media}.manifest.v1+json",
        "config": put(blobs, f"{media}.config.v1+json", document),
        "layers": [descriptor for descriptor, _ in written],
    }
    named = put(blobs, f"{media}.manifest.v1+json", manifest)
    named["annotations"] = {"org.opencontainers.image.ref.name": name}
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    return str(named["digest"])


def config(role: str) -> dict[str, Any]:
    """Start of a container of the image."""
    facts = FACTS["images"][role]
    return {
        "User": str(FACTS["user"]),
        "Env": [f"{key}={value}" for key, value in {**FACTS["env"], **facts["env"]}.items()],
        "Entrypoint": facts["entrypoint"],
        "Cmd": facts["cmd"],
        "WorkingDir": facts["workdir"],
        "ExposedPorts": {f"{port}/tcp": {} for port in facts["ports"]},
    }


def put(blobs: Path, media_type: str, document: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(document, sort_keys=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def materials(role: str, version: str, parts: Iterable[Path]) -> dict[str, Any]:
    """A CycloneDX document: each package with its version and the hash of the downloaded file."""
    components = []
    for path in parts:
        kind, separator = ("deb/debian", "_") if path.suffix == ".deb" else ("pypi", "-")
        name, release = path.name.replace("%3a", ":").split(separator)[:2]
        name = name if separator == "_" else name.lower().replace("_", "-")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        components.append({
            "type": "library", "name": name, "version": release,
            "purl": f"pkg:{kind}/{name}@{release}",
            "hashes": [{"alg": "SHA-256", "content": digest}],
        })  # fmt: skip
    subject = {"type": "container", "name": f"holdfast/{role}", "version": version}
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return {**document, "metadata": {"component": subject}, "components": components}


# -- Dockerfiles -------------------------------------------------------------------------------
def dockerfile(role: str, version: str) -> str:
    facts = FACTS["images"][role]
    debian = [*FACTS["debian"], *facts["debian"]]
    pip = [f"{PREFIX}/bin/pip", "install", "--no-cache-dir", "--compile"]
    update = '["apt-get", "update"]'
    install = ["apt-get", "install", "--yes", "--no-install-recommends"]
    sources = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", *facts["packages"])
    env = " \\\n    ".join(
        f"{key}={value}" for key, value in {**FACTS["env"], **facts["env"]}.items()
    )
    lines = [
        "# `python -m images.build --dockerfiles` writes this file from images/files.yaml.",
        f"#   docker build -f images/{role}/Dockerfile -t holdfast/{role}:{version} .",
        f"ARG BASE={FACTS['base']}",
        "FROM ${BASE} AS build",
        f"RUN {update}",
        f"RUN {json.dumps([*install, *debian, 'python3.11-venv'])}",
        f'RUN ["python3.11", "-m", "venv", "{PREFIX}"]',
        f"COPY images/{role}/requirements.txt /build/requirements.txt",
        f"RUN {json.dumps([*pip, '--requirement', '/build/requirements.txt'])}",
        *(f"COPY {name} /build/{name}" for name in sources),
        f"RUN {json.dumps([*pip, '--no-deps', '/build'])}",
        "",
        "FROM ${BASE}",
        f'LABEL org.opencontainers.image.title="holdfast {role}" \\',
        f'      org.opencontainers.image.description="{facts["description"]}" \\',
        f'      org.opencontainers.image.version="{version}"',
        f"RUN {update}",
        f"RUN {json.dumps([*install, *debian])}",
        f"COPY --from=build {PREFIX} {PREFIX}",
        f"ENV {env}",
        f"USER {FACTS['user']}",
        f"WORKDIR {facts['workdir']}",
        *(["EXPOSE " + " ".join(map(str, facts["ports"]))] if facts["ports"] else []),
        f"ENTRYPOINT {json.dumps(facts['entrypoint'])}",
        *([f"CMD {json.dumps(facts['cmd'])}"] if facts["cmd"] else []),
    ]
    return "\n".join(lines) + "\n"


def build(role: str, out: Path, work: Path, torch_lock: Path | None, holdfast: Path) -> str:
    torch, rest = lock_parts(ROOT / "images" / role / "requirements.txt")
    if torch and torch_lock:
        torch = torch_lock.read_text()
    places = work / "wheels"
    torch_wheels = wheels(torch, places / "torch") if torch else []
    rest_wheels = wheels(rest, places / role)
    return write_image(role, debian_packages(role, work), torch_wheels, rest_wheels, holdfast, out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m images.build", description=__doc__)
    parser.add_argument("roles", nargs="*", metavar="ROLE", help="operator, worker; default: both")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "images", metavar="DIR")
    parser.add_argument(
        "--torch",
        type=Path,
        metavar="FILE",
        help="requirements with hashes of another build of torch, such as the CPU's; "
        "default: that of the lock",
    )
    parser.add_argument("--dockerfiles", action="store_true", help="write only the Dockerfiles")
    words = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    from holdfast.orchestrator.limits import RELEASE

    if words.dockerfiles:
        for role in ROLES:
            (ROOT / "images" / role / "Dockerfile").write_text(dockerfile(role, RELEASE))
        return 0
    try:
        if unknown := set(words.roles) - set(ROLES):
            raise BuildError(f"ROLE: got {unknown.pop()}; expected {' or '.join(ROLES)}")
        if sys.version_info[:2] != PYTHON:
            raise BuildError(
                f"needs Python 3.11, that of the images; this is {platform.python_version()}"
            )
        work = ROOT / "build" / "images"
        work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as directory:
            holdfast = distributions(Path(directory))
            for role in words.roles or ROLES:
                digest = build(role, words.out, work, words.torch, holdfast)
                size = sum(p.stat().st_size for p in (words.out / role).rglob("*") if p.is_file())
                print(f"{role}: {size / 1e6:.1f} MB, {digest}", flush=True)
    except BuildError as error:
        print(f"images: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

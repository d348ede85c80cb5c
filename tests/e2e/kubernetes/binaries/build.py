"""Builds the programs of the rig into a cache, once for each set of pinned versions.

Needs Go and the Go module proxy, and a Debian-like apt-get for the node programs; nothing is
installed. Uses only the standard library, so that it works before there is a virtual environment.
Takes minutes, so tests do not run it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
KUBERNETES = HERE / "kubernetes"
HELM = HERE / "helm"

APPLETS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
HELM_PACKAGE = "helm.sh/helm/v3/cmd/helm"

# Paths of the programs in the packages.
DEBIAN_PACKAGES = ("containerd", "runc", "containernetworking-plugins")
DEBIAN_PROGRAMS = (
    "usr/bin/containerd",
    "usr/bin/containerd-shim-runc-v2",
    "usr/bin/ctr",
    "usr/sbin/runc",
    "usr/lib/cni/bridge",
    "usr/lib/cni/host-local",
    "usr/lib/cni/loopback",
)
# Change this when the build has another result for the same sources.
RECIPE = "1"
# Compiled packages and modules take about 4 GiB of Go's caches, the result 0.3 GiB.
NEEDED_DISK_BYTES = 6 * 2**30


class BuildError(Exception):
    """An error message and its fix, for the user."""


def key() -> str:
    """The name of the cache entry; depends on pinned versions, our main programs and the recipe."""
    digest = hashlib.sha256(RECIPE.encode())
    for path in sorted(HERE.rglob("*")):
        if path.suffix in (".go", ".mod", ".sum"):
            digest.update(f"{path.relative_to(HERE)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache() -> Path:
    """The directory for the binaries of the current pins."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "holdfast" / "kubernetes" / key()


def complete(directory: Path) -> bool:
    return (directory / "complete").exists()


def say(text: str) -> None:
    print(text, flush=True)


def go() -> str:
    program = shutil.which("go")
    if program is None:
        raise BuildError(
            "`go` was not found on PATH. The Kubernetes programs are built from source, with "
            "Go 1.26 or newer (https://go.dev/doc/install). Or set HOLDFAST_KUBERNETES_BINARIES "
            "to a directory that holds " + ", ".join(APPLETS) + " and helm."
        )
    return program


def version_of(directory: Path, module: str) -> str:
    """The version of a module that the go.mod of a directory requires."""
    found = re.search(rf"{re.escape(module)} (v\S+)", (directory / "go.mod").read_text())
    if found is None:
        raise BuildError(f"{directory / 'go.mod'} does not require {module}")
    return found[1]


def run_go(directory: Path, *arguments: str, what: str, environment: dict[str, str]) -> None:
    """Run go, count the packages that it reports, and explain a failure."""
    started_s = shown_s = time.monotonic()
    tail: list[str] = []
    process = subprocess.Popen(
        [go(), *arguments],
        cwd=directory,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    num_packages = 0
    try:
        for line in process.stdout:
            num_packages += 1
            tail = [*tail[-40:], line.rstrip()]
            if time.monotonic() - shown_s > 10:
                shown_s = time.monotonic()
                say(f"  {what}: {num_packages} packages, {shown_s - started_s:.0f} s")
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
    if process.returncode:
        raise BuildError(explain(what, tail))
    say(f"  {what}: done, {num_packages} packages, {time.monotonic() - started_s:.0f} s")


def explain(what: str, tail: list[str]) -> str:
    text = "\n".join(f"    {line}" for line in tail[-15:])
    advice = "The lines above are what go said."
    unreachable = (
        *("dial tcp", "no such host", "i/o timeout", "connection refused", "proxyconnect"),
        "disabled by GOPROXY",
    )
    if any(word in line for line in tail for word in unreachable):
        advice = (
            "The Go module proxy could not be reached: check the network, and what "
            "`go env GOPROXY` says."
        )
    elif any("no space left" in line for line in tail):
        advice = "The disk is full: `go env GOCACHE GOMODCACHE` says where Go keeps its files."
    elif any("requires go >=" in line for line in tail):
        advice = "This Go is too old: install the version that it asks for."
    return f"{what}: go failed.\n{text}\n{advice}"


def check_disk(directory: Path) -> None:
    cached = subprocess.run([go(), "env", "GOCACHE"], capture_output=True, text=True, check=True)
    for place in (Path(cached.stdout.strip()), directory):
        there = place
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
        if free < NEEDED_DISK_BYTES:
            raise BuildError(
                f"{there} has {free / 2**30:.1f} GiB free; the build needs "
                f"{NEEDED_DISK_BYTES / 2**30:.0f} GiB. Free some, or set GOCACHE, GOMODCACHE and "
                "XDG_CACHE_HOME to a larger disk."
            )


def build_kubernetes(target: Path) -> None:
    version = version_of(KUBERNETES, "k8s.io/kubernetes")
    say(f"Kubernetes {version}, etcd {version_of(KUBERNETES, 'go.etcd.io/etcd/server/v3')}:")
    static = {"CGO_ENABLED": "0"}
    # Without these the programs report v0.0.0, and kubectl warns about version skew.
    flags = " ".join(
        f"-X {package}.gitVersion={version}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    )
    built = ["build", "-v", "-buildvcs=false", "-trimpath", "-ldflags", f"-s -w {flags}", "-o"]
    run_go(KUBERNETES, "mod", "download", what="download of modules", environment=static)
    run_go(KUBERNETES, *built, f"{target}/kubernetes", ".", what="compile", environment=static)
    run_go(KUBERNETES, *built, f"{target}/pause", "./pause", what="pause", environment=static)
    for name in APPLETS:
        (target / name).symlink_to("kubernetes")


def build_helm(target: Path) -> None:
    version = version_of(HELM, "helm.sh/helm/v3")
    say(f"Helm {version}:")
    flags = f"-s -w -X helm.sh/helm/v3/internal/version.version={version}"
    run_go(
        HELM,
        *(
            "build",
            "-v",
            "-buildvcs=false",
            "-trimpath",
            "-ldflags",
            flags,
            "-o",
            f"{target}/helm",
            HELM_PACKAGE,
        ),
        what="compile",
        environment={"CGO_ENABLED": "0"},
    )


def unpack_debian(target: Path) -> str | None:
    """Extract the node programs from Debian packages; return the reason if that fails."""
    tools = ("apt-get", "dpkg")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found"
    with tempfile.TemporaryDirectory() as scratch:
        command = ["apt-get", "download", "-q", *DEBIAN_PACKAGES]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode and os.geteuid() == 0:
            subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False)
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"apt-get download failed: {done.stderr.strip()[-500:]}"
        for package in sorted(Path(scratch).glob("*.deb")):
            say(f"  {package.name}")
            subprocess.run(["dpkg", "-x", str(package), scratch], check=True)
        for name in DEBIAN_PROGRAMS:
            if not (Path(scratch) / name).exists():
                return f"the Debian packages hold no {name}"
            shutil.copy2(Path(scratch) / name, target / Path(name).name)
    return None


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """One build at a time; a second one waits and finds the result."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another build is running; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build() -> Path:
    directory = cache()
    with only_one(directory):
        if complete(directory):
            say(f"The Kubernetes binaries are in {directory}")
            return directory
        started_s = time.monotonic()
        check_disk(directory)
        partial = directory.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        build_kubernetes(partial)
        build_helm(partial)
        say("containerd, runc and CNI plugins, unpacked from Debian packages:")
        if refusal := unpack_debian(partial):
            say(f"  left out: {refusal}. Tests that start nodes will be skipped, unless PATH has")
            say("  containerd, containerd-shim-runc-v2, ctr, runc and the CNI plugins.")
        (partial / "complete").write_text(f"{refusal or 'with node programs'}\n")
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        say(f"Built in {time.monotonic() - started_s:.0f} s: {directory}")
    return directory


def pin(kubernetes: str) -> None:
    """Rewrites the go.mod of the Kubernetes programs for another version of Kubernetes.

    Kubernetes replaces its own libraries by folders of its repository, so they have to be
    replaced here by the published modules: v1.36.2 belongs to v0.36.2.
    """
    with tempfile.TemporaryDirectory() as empty:
        found = subprocess.run(
            [go(), "mod", "download", "-json", f"k8s.io/kubernetes@{kubernetes}"],
            cwd=empty,
            capture_output=True,
            text=True,
            check=True,
        )
    theirs = Path(json.loads(found.stdout)["GoMod"]).read_text()
    published = kubernetes.replace("v1.", "v0.", 1)
    staged = re.findall(r"^\s*(k8s\.io/\S+) => \./staging", theirs, flags=re.MULTILINE)
    language = re.search(r"^go (\S+)", theirs, flags=re.MULTILINE)
    etcd = re.search(r"go\.etcd\.io/etcd/server/v3 (v\S+)", theirs) or re.search(
        r"go\.etcd\.io/etcd/client/v3 (v\S+)", theirs
    )
    assert language and etcd and staged, "the go.mod of Kubernetes is not what it was"
    lines = [
        "// Written by build.py --pin; the Kubernetes libraries are replaced by published modules.",
        "module holdfast.dev/tests/kubernetes",
        "",
        f"go {language[1]}",
        "",
        "require (",
        f"\tgo.etcd.io/etcd/server/v3 {etcd[1]}",
        f"\tk8s.io/kubernetes {kubernetes}",
        ")",
        "",
        "replace (",
        *(f"\t{module} => {module} {published}" for module in staged),
        ")",
        "",
    ]
    (KUBERNETES / "go.mod").write_text("\n".join(lines))
    (KUBERNETES / "go.sum").unlink(missing_ok=True)
    run_go(KUBERNETES, "mod", "tidy", what="go mod tidy", environment={})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--where", action="store_true", help="print the cache directory and stop")
    parser.add_argument("--pin", metavar="VERSION", help="move to this version of Kubernetes")
    options = parser.parse_args()
    try:
        if options.pin:
            pin(options.pin)
        elif options.where:
            say(str(cache()))
        else:
            build()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

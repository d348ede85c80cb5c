"""Builds a release into one folder with checksums, and pushes its images and chart to a registry.

    python -m tools.release --registry registry.example.com/holdfast [--skip-images] [--out dist]
    python -m tools.release --registry registry.example.com/holdfast --push [--plain-http]

A release contains what the last commit contains: with other changes in the tree it is not built.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from holdfast.orchestrator.limits import RELEASE
from images.build import PREFIX, ROLES, ROOT, BuildError, distributions, epoch, run
from images.build import main as build_images
from tests.e2e.kubernetes.rig.binaries import locate

OUT = ROOT / "dist"
CHART = ROOT / "helm" / "holdfast"
PYTHON = f"{PREFIX}/bin/python"
BIN = Path(sys.executable).parent
SMOKE = {
    "operator": "s3fs, holdfast.orchestrator.cli.main, holdfast.orchestrator.hosts.kubernetes",
    "worker": "s3fs, torch, holdfast.session, holdfast.workers.agent.process.node",
}
"""Role -> what its program imports."""


def helm(*words: str | Path) -> None:
    program = locate().find("helm")
    if program is None:
        raise BuildError("helm: not installed; install it, or run `make kubernetes-binaries`")
    run(program, *words, wanted=f"for helm {words[0]}")


def skopeo(*words: str) -> None:
    run("skopeo", *words, wanted="to push images", package="skopeo")


def unpack(layout: Path, root: Path) -> None:
    """Lay out the files of an image."""

    def blob(digest: str) -> Path:
        return layout / "blobs" / Path(*digest.split(":"))

    named = json.loads((layout / "index.json").read_text())["manifests"][0]
    for layer in json.loads(blob(named["digest"]).read_text())["layers"]:
        with tarfile.open(blob(layer["digest"])) as tar:
            tar.extractall(root, filter="tar")


def smoke(layout: Path) -> None:
    """Start the program of an image in its own files, without a container engine."""
    with tempfile.TemporaryDirectory() as directory:
        unpack(layout, Path(directory))
        (random := Path(directory, "dev", "urandom")).parent.mkdir(exist_ok=True)
        random.write_bytes(os.urandom(4096))  # torch reads it
        rights = () if os.geteuid() == 0 else ("--map-root-user",)
        code = f"import {SMOKE[layout.name]}; print('holdfast', holdfast.__version__)"
        words = ("unshare", *rights, "--net", f"--root={directory}", "--wd=/", PYTHON, "-c", code)
        shown = run(*words, wanted=f"to start the {layout.name}'s image", package="util-linux")
    if f"holdfast {RELEASE}" not in shown.decode():
        raise BuildError(f"the {layout.name}'s image shows another version: {shown.decode()}")


def package_chart(out: Path, registry: str) -> None:
    """Package the chart, with the images of a registry as its defaults."""
    helm("lint", "--strict", CHART)
    with tempfile.TemporaryDirectory() as directory:
        chart = shutil.copytree(CHART, Path(directory) / "holdfast")
        values = (chart / "values.yaml").read_text()
        for line in ("  repository: registry.invalid/holdfast/operator\n", '  image: ""\n'):
            assert values.count(line) == 1, line
        values = values.replace("registry.invalid/holdfast/operator\n", f"{registry}/operator\n")
        values = values.replace('  image: ""\n', f"  image: {registry}/worker:{RELEASE}\n")
        (chart / "values.yaml").write_text(values)
        helm("package", chart, "--destination", out)


def build(out: Path, registry: str, *, skip_images: bool) -> None:
    if changed := run("git", "status", "--porcelain", wanted="to see changes", package="git"):
        raise BuildError(f"commit these changes first:\n{changed.decode().rstrip()}")
    if out != OUT and out.exists() and any(out.iterdir()):
        raise BuildError(f"--out: got {out}, which has files; expected a new folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch())
    distributions(out, sdist=True)
    files = sorted(out.iterdir())
    run(BIN / "twine", "check", "--strict", *files, wanted="to check the distributions")
    run(BIN / "check-wheel-contents", *out.glob("*.whl"), wanted="to check the wheel")
    package_chart(out, registry)
    if not skip_images:
        if build_images([f"--out={out / 'images'}"]):
            raise BuildError(
                "without the images the release is not whole; --skip-images leaves them out"
            )
        for role in ROLES:
            smoke(out / "images" / role)
            (out / "images" / f"{role}.cdx.json").rename(
                out / f"holdfast-{role}-{RELEASE}.cdx.json"
            )
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    lines = []
    for path in paths:
        with path.open("rb") as file:
            lines.append(
                f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(out)}"
            )
    (out / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    print(f"release {RELEASE}: {len(paths)} files in {out}, listed in SHA256SUMS")


def push(out: Path, registry: str, *, plain_http: bool = False) -> None:
    """Push what `build` wrote. `plain_http`: without TLS, as to a registry on this machine."""
    for role in ROLES:
        target = f"docker://{registry}/{role}:{RELEASE}"
        layout = f"oci:{out / 'images' / role}:{RELEASE}"
        verify = f"--dest-tls-verify={not plain_http}".lower()
        skopeo("--insecure-policy", "copy", verify, layout, target)
    plain = ["--plain-http"] if plain_http else []
    helm("push", out / f"holdfast-{RELEASE}.tgz", f"oci://{registry}/charts", *plain)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    parser.add_argument("--skip-images", action="store_true")
    parser.add_argument("--registry", required=True, help="where the images are, or will be")
    parser.add_argument("--push", action="store_true", help="push images and chart of DIR")
    parser.add_argument("--plain-http", action="store_true", help="push without TLS")
    words = parser.parse_args()
    registry = words.registry.lower()  # names of images are
    try:
        if not registry:
            expected = "where its images are, as in `make release REGISTRY=registry.example.com/x`"
            raise BuildError(f"--registry: got nothing; expected {expected}")
        if words.push:
            if not (words.out / "SHA256SUMS").exists():
                raise BuildError(f"{words.out}: got no release; expected one of `make release`")
            push(words.out.resolve(), registry, plain_http=words.plain_http)
        else:
            build(words.out.resolve(), registry, skip_images=words.skip_images)
    except BuildError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

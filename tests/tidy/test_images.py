"""The layers of images, and what their build needs."""

from __future__ import annotations

import marshal
import shutil
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from images import build
from tools import release

PACKAGES = build.PACKAGES[1:]
FILES = {
    "part/__init__.py": "def main() -> None: ...\n",
    "part/template.py": "{% not Python %}\n",
    "part/left_out/x.py": "",
    "part-1.data/scripts/tool": "#!python\n",
    "part-1.data/data/share/part.txt": "text\n",
    "part-1.dist-info/entry_points.txt": "[console_scripts]\npart = part:main\n",
}


def test_a_wheel_in_a_layer_is_as_pip_installs_it(tmp_path: Path) -> None:
    wheel = tmp_path / "part-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    digests = set()
    for name in ("first", "second"):
        layer = build.wheel_layer([wheel], ["part/left_out/"])
        digests.add(build.write_layout(tmp_path / name, [(layer, 1)], {}, "1"))
    assert len(digests) == 1, "the same files have the same digest"
    release.unpack(tmp_path / "first", tmp_path / "root")
    root = tmp_path / "root"
    paths = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert paths == {
        "opt/holdfast/bin/part", "opt/holdfast/bin/tool", "opt/holdfast/share/part.txt",
        *(f"{PACKAGES}/{n}" for n in FILES if ".data" not in n and "left_out" not in n),
        f"{PACKAGES}/part/__pycache__/__init__.cpython-311.pyc",
    }  # fmt: skip
    python = b"#!/opt/holdfast/bin/python\n"
    for name in ("part", "tool"):
        assert (root / "opt/holdfast/bin" / name).read_bytes().startswith(python)
    compiled = (root / PACKAGES / "part/__pycache__/__init__.cpython-311.pyc").read_bytes()
    assert marshal.loads(compiled[16:]).co_filename == f"{build.PACKAGES}/part/__init__.py"


def test_a_bill_of_materials_names_packages_of_debian_and_of_python(tmp_path: Path) -> None:
    parts = [tmp_path / "libc6_1%3a2.36-9_amd64.deb", tmp_path / "Py_Part-1.0-py3-none-any.whl"]
    for path in parts:
        path.touch()
    names = [part["purl"] for part in build.materials("operator", "1", parts)["components"]]
    assert names == ["pkg:deb/debian/libc6@1:2.36-9", "pkg:pypi/py-part@1.0"]


@pytest.mark.parametrize("kind", ["wheels", "debian"])
def test_without_a_network_the_build_says_what_it_needs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    (sources := tmp_path / "x.list").write_text("deb [trusted=yes] http://127.0.0.1:9/ a main\n")
    monkeypatch.setattr(build, "DEBIAN_SOURCES", (str(sources),))
    _, lock = build.lock_parts(build.ROOT / "images" / "operator" / "requirements.txt")
    with pytest.raises(build.BuildError, match=r"network needed|apt install apt"):
        if kind == "wheels":
            build.wheels(lock, tmp_path / "wheels")
        else:
            build.debian_packages("operator", tmp_path)


def test_torch_and_its_libraries_have_a_layer_of_their_own() -> None:
    torch, rest = build.lock_parts(build.ROOT / "images" / "worker" / "requirements.txt")
    assert torch.startswith("cuda-bindings==") and "\ntorch==" in torch and "\ntriton==" in torch
    assert "\nnumpy==" in rest and "\ntorchao==" in rest and "nvidia" not in rest
    assert build.lock_parts(build.ROOT / "images" / "operator" / "requirements.txt")[0] == ""


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(403)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo not found")
def test_a_registry_that_forbids_a_push_is_named(tmp_path: Path) -> None:
    layer = build.Layer()
    layer.file("x", b"x")
    build.write_layout(tmp_path / "images" / "operator", [(layer, 1)], {}, release.RELEASE)
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"127.0.0.1:{server.server_port}"
    with pytest.raises(build.BuildError, match=rf"skopeo, to push images: (?s:.*){where}.*403"):
        release.push(tmp_path, f"{where}/holdfast", plain_http=True)
    server.shutdown()


def test_a_missing_tool_is_named_with_its_package(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="nope: not installed, needed to try; apt install p"):
        build.run("nope", wanted="to try", package="p")

"""The archive of a job's first code on Ray, unpacked by Ray itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.cli import code_files
from holdfast.orchestrator.cli.targets.ray import working_dir
from holdfast.orchestrator.errors import UserError

packaging = pytest.importorskip(
    "ray._private.runtime_env.packaging", reason="Ray is not installed: pip install '.[ray]'"
)
SPEC = ("job.yaml", "spec")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    found = tmp_path / "job"
    for name in ("train.py", "lib/model.py", "conf/a.yaml", ".env", "id_rsa", "job.yaml", "out/x"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(name)
    (found / ".gitignore").write_text("out\n")
    (found / "train.py").chmod(0o755)
    return found


def unpacked(place: Path) -> tuple[dict[str, str], list[str], str]:
    """(name -> text as a node gets it, remarks, the name that Ray gives the archive)."""
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    archive, node = place.parent / "code.zip", place.parent / "node"
    chosen = code_files.choose(place)
    remarks = [*chosen.remarks, *working_dir.write(archive, SPEC, place, chosen.sizes)]
    uploaded: list[tuple[str, bool]] = []

    def upload(path: str, *, excludes: list[str], is_file: bool = False) -> None:
        uploaded.append((path, is_file))

    given = {"working_dir": str(archive)}
    done = upload_working_dir_if_needed(given, include_gitignore=True, upload_fn=upload)
    assert uploaded == [(str(archive), True)], "Ray uploads the archive as it is"
    packaging.unzip_package(str(archive), str(node), False, False)
    found = {
        str(path.relative_to(node)): path.read_text() for path in node.rglob("*") if path.is_file()
    }
    return found, remarks, done["working_dir"]


def test_a_node_gets_what_edited_code_has_and_the_spec(place: Path) -> None:
    found, remarks, _name = unpacked(place)
    assert found.keys() == set(code_files.pack(place).files)
    assert found["train.py"] == "train.py" and found["job.yaml"] == "spec"
    assert os.access(place.parent / "node" / "train.py", os.X_OK)
    assert not os.access(place.parent / "node" / "lib" / "model.py", os.X_OK)
    assert remarks == ["not uploaded, because the name is one of secrets: .env, id_rsa"]


def test_the_same_files_have_the_same_name(place: Path) -> None:
    _found, _remarks, first = unpacked(place)
    os.utime(place / "train.py", (1, 1))
    (place / "out" / "x").write_text("other")
    assert unpacked(place)[2] == first
    (place / "train.py").write_text("other")
    assert unpacked(place)[2] != first


def test_links_become_what_they_lead_to_and_never_a_secret(place: Path) -> None:
    links = {
        "a.yaml": "conf/a.yaml", "confs": "conf", "conf/lib": "../lib", "config": ".env",
        "lib/up": "..", "gone": "nothing", "away": "/etc/hostname",
    }  # fmt: skip
    for name, target in links.items():
        (place / name).symlink_to(target)
    found, remarks, _name = unpacked(place)
    assert found["a.yaml"] == found["confs/a.yaml"] == "conf/a.yaml"
    assert found["conf/lib/model.py"] == found["confs/lib/model.py"] == "lib/model.py"
    assert found["lib/up/train.py"] == "train.py"
    assert not [name for name in found if ".env" in name or "id_rsa" in name]
    assert not {"config", "gone", "away"} & found.keys()
    assert remarks[1:] == [
        "not uploaded, because the link leads out of the directory: away",
        "not uploaded, because what the link leads to is not: config, gone",
    ] or remarks[:2] == [
        "not uploaded, because the name is one of secrets: .env, id_rsa",
        "not uploaded, because the link leads out of the directory: away",
    ]


@pytest.mark.parametrize("make", [lambda: "a\\b.py", lambda: os.fsdecode(b"\xff.py")])
def test_a_name_that_ray_does_not_unpack_is_refused(place: Path, make: Callable[[], str]) -> None:
    (place / make()).touch()
    with pytest.raises(UserError, match=r"code: got .*py; expected names in UTF-8"):
        unpacked(place)


def test_an_archive_that_rays_head_would_not_take_is_rejected_before_it_is_whole(
    tmp_path: Path,
) -> None:
    place = tmp_path / "job"
    place.mkdir()
    (place / "train.py").write_text("print('hello')\n")
    (place / "data.bin").write_bytes(os.urandom(3 * 2**20))
    (place / "zeros.bin").write_bytes(bytes(2 * 2**20))  # compressed next to nothing
    chosen = code_files.choose(place)
    archive = tmp_path / "code.zip"
    with pytest.raises(UserError) as rejected:
        list(working_dir.write(archive, SPEC, place, chosen.sizes, max_bytes=2**20))
    text = str(rejected.value)
    assert text.startswith(
        f"code: got over 1 MiB compressed in 3 files of {place}; expected at most 1 MiB compressed,"
    )
    assert "the largest are data.bin (3.0 MiB), zeros.bin (2.0 MiB), train.py" in str(
        rejected.value
    )
    assert ".gitignore" in str(rejected.value) and archive.stat().st_size < 2.5 * 2**20
    (place / ".gitignore").write_text("data.bin\n")
    list(working_dir.write(archive, SPEC, place, code_files.choose(place).sizes, max_bytes=2**20))

"""Packed code: the same files have the same name, and none is unpacked outside of its directory."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import code_archive
from holdfast.orchestrator.protocol.code_archive import BadArchive

WORD = st.text("abcé_-. ", min_size=1, max_size=12).filter(lambda word: word.strip(".") != "")
FILES = st.dictionaries(
    st.lists(WORD, min_size=1, max_size=3).map("/".join), st.binary(max_size=200), max_size=8
)


def made(entries: list[tarfile.TarInfo], data: bytes = b"x") -> tuple[str, bytes]:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for entry in entries:
            entry.size = len(data) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(data) if entry.isreg() else None)
    content = held.getvalue()
    return code_archive.name_of(content), gzip.compress(content)


def sparse(name: str, size: int) -> tarfile.TarInfo:
    """A file of `size` bytes without data, as GNU tar stores it."""

    class Sparse(tarfile.TarInfo):
        def tobuf(self, *_: object, **__: object) -> bytes:
            head = bytearray(super().tobuf(tarfile.GNU_FORMAT))
            head[386:410] = b"%011o\0" % 0 * 2
            head[483:495] = b"%011o\0" % size
            head[148:156] = b" " * 8
            head[148:156] = b"%06o\0 " % sum(head)
            return bytes(head)

    entry = Sparse(name)
    entry.type = tarfile.GNUTYPE_SPARSE
    return entry


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


@given(files=FILES)
@settings(max_examples=40, deadline=None)
def test_what_is_unpacked_is_what_was_packed(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    written = {}
    for name, data in files.items():
        path = source / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            continue  # one name is the directory of another
        written[str(path.relative_to(source))] = data
    name, archive = code_archive.pack(source, written)
    code_archive.unpack(name, archive, target)
    found = {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == written


def test_times_and_owners_do_not_count_but_content_and_the_executable_bit_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.py").write_text("1")
    first, _ = code_archive.pack(tmp_path, ["a.py"])
    os.utime(tmp_path / "a.py", (1, 1))
    assert code_archive.pack(tmp_path, ["a.py"])[0] == first
    (tmp_path / "a.py").chmod(0o755)
    executable, _ = code_archive.pack(tmp_path, ["a.py"])
    (tmp_path / "a.py").write_text("2")
    changed, _ = code_archive.pack(tmp_path, ["a.py"])
    assert len({first, executable, changed}) == 3


def test_links_and_the_executable_bit_arrive(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "tools").mkdir(parents=True)
    target.mkdir()
    (source / "tools" / "run.sh").write_text("#!/bin/sh\n")
    (source / "tools" / "run.sh").chmod(0o700)
    (source / "run").symlink_to("tools/run.sh")
    code_archive.unpack(*code_archive.pack(source, ["tools/run.sh", "run"]), target)
    assert (target / "run").read_text() == "#!/bin/sh\n"
    assert (target / "run").stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([tarfile.TarInfo("../a")], id="above"),
        pytest.param([tarfile.TarInfo("/a")], id="absolute"),
        pytest.param([link("a", "/etc/passwd")], id="absolute-link"),
        pytest.param([link("d/a", "../../b")], id="link-out"),
        pytest.param([link("d/a", "x/../../../b")], id="link-out-by-a-detour"),
        pytest.param([link("a", "."), link("a/a/x", "../b")], id="link-below-a-link"),
        pytest.param([link("a", "."), link("x", "a/../b")], id="link-out-through-a-link"),
        pytest.param(
            [link("d/a", "../e/f"), link("e/f", "."), link("x", "d/a/../../b")], id="two-links"
        ),
        pytest.param([sparse("a", 2**31)], id="sparse"),
        pytest.param([link("a", "b", tarfile.LNKTYPE)], id="hard-link"),
        pytest.param([link("a", "", tarfile.FIFOTYPE)], id="fifo"),
        pytest.param([link("a", "", tarfile.CHRTYPE)], id="device"),
    ],
)
def test_an_archive_that_leads_out_is_refused(
    tmp_path: Path, entries: list[tarfile.TarInfo]
) -> None:
    with pytest.raises(BadArchive):
        code_archive.unpack(*made(entries), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_through_links_inside_arrive(tmp_path: Path) -> None:
    entries = [link("up/here", ".."), link("x", "up/here/b"), link("circle", "circle")]
    code_archive.unpack(*made([*entries, tarfile.TarInfo("b")]), tmp_path)
    assert (tmp_path / "x").resolve() == tmp_path / "b"


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    target, aside = tmp_path / "target", tmp_path / "target" / "aside"
    aside.mkdir(parents=True)
    entries = [link("way", "aside"), tarfile.TarInfo("way/a")]
    with pytest.raises(BadArchive, match="way/a leads out"):
        code_archive.unpack(*made(entries), target)
    assert list(aside.iterdir()) == []


def test_another_content_a_torn_archive_and_a_bomb_are_refused(tmp_path: Path) -> None:
    name, archive = made([tarfile.TarInfo("a")])
    other = "0" * 64
    with pytest.raises(BadArchive, match="another one"):
        code_archive.unpack(other, archive, tmp_path)
    for torn in (archive[:-20], b"", b"no gzip"):
        with pytest.raises(BadArchive):
            code_archive.unpack(name, torn, tmp_path)
    with pytest.raises(BadArchive, match="more than"):
        code_archive.unpack(name, gzip.compress(bytes(limits.MAX_CODE_BYTES + 1)), tmp_path)

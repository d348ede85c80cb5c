"""The archive that Ray unpacks on each node as a job's working_dir: the spec, and the same files
that edited code has.

Made here and not by Ray's own packer, which takes secrets along and does not know what git tracks.
Ray's archives have no links: a link within the directory becomes what it leads to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from holdfast.orchestrator import limits
from holdfast.orchestrator.cli import code_files
from holdfast.orchestrator.errors import UserError

BLOCK_BYTES = 2**20


def write(
    archive: Path,
    spec: tuple[str, str],
    directory: Path,
    chosen: Mapping[str, int],
    max_bytes: int = limits.MAX_RAY_ARCHIVE_BYTES,
) -> Iterator[str]:
    """Write a new archive of these files and links of a directory, with a spec of this (name, text)
    at its top. Yields remarks for the user. Raises UserError, as soon as the archive is too
    large."""
    root, lost = directory.resolve(), list[str]()
    with code_files.readable(), ZipFile(archive, "w", ZIP_DEFLATED) as zipped:
        zipped.writestr(_entry(spec[0], 0), spec[1].encode())
        for name in (member for member in chosen if member != spec[0]):
            files = list(_unlinked(name, _target(root, name), chosen, root, frozenset()))
            if not files:
                lost.append(name)
            for inner, path in files:
                for _block in _written(zipped, inner, root / path):
                    if archive.stat().st_size > max_bytes:
                        limit = f"{max_bytes / 2**20:g} MiB compressed"
                        expected = f"at most {limit}, the limit of Ray's head"
                        raise code_files.too_large(directory, chosen, f"over {limit}", expected)
    if lost:
        yield code_files.remark("because what the link leads to is not", lost)


def _unlinked(
    name: str, target: str | None, chosen: Collection[str], root: Path, seen: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """(name in the archive, file) of a file, or of each file of a directory that a link leads to;
    only of those that were chosen. `seen`: the directories that the name is in by links."""
    if target is None or target in seen:
        return
    if target in chosen and not (root / target).is_symlink():
        yield name, target
        return
    begin = "" if target == "." else f"{target}/"
    for inner in (member for member in chosen if member.startswith(begin)):
        below = f"{name}/{inner.removeprefix(begin)}"
        yield from _unlinked(below, _target(root, inner), chosen, root, seen | {target})


def _target(root: Path, name: str) -> str | None:
    """Target of a name; None: nothing, or a path outside the directory."""
    path = root / name
    if not path.is_symlink():
        return name
    try:
        return path.resolve(strict=True).relative_to(root).as_posix()
    except (OSError, RuntimeError, ValueError):
        return None


def _written(made: ZipFile, name: str, path: Path) -> Iterator[None]:
    """Write a file; one item for each block."""
    with path.open("rb") as source:
        status = os.fstat(source.fileno())
        entry = _entry(name, status.st_mode & stat.S_IXUSR)
        entry.file_size = status.st_size  # whether it needs the format for large files
        with made.open(entry, "w") as copy:
            while block := source.read(BLOCK_BYTES):
                copy.write(block)
                yield


def _entry(name: str, executable: int) -> ZipInfo:
    """Archive entry without a time: the same files make the same archive, which Ray keeps once.
    Raises UserError."""
    try:
        name.encode()
    except UnicodeEncodeError:
        name = os.fsencode(name).decode(errors="backslashreplace")
    if "\\" in name:
        expected = "names in UTF-8 without backslashes: Ray unpacks no others"
        raise UserError.of("code", name, expected, "rename it, or name it in .gitignore")
    entry = ZipInfo(name)
    entry.compress_type = ZIP_DEFLATED
    entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    return entry

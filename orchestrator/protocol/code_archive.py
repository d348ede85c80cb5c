"""The archive of a job's code: how it is packed, named and unpacked.

A gzipped tar of regular files and of links within the directory. Its name is the SHA-256 of the
tar, not of the compressed bytes: two versions of zlib may compress the same files differently. The
tar holds no times, owners or permissions but "executable", so that the same files have the same
name.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from .. import limits
from ..errors import Damaged

MODIFIED_S = 315_532_800
"""1980: zip files, which programs make of what lies beside a script, have no earlier time."""
_NO_TIME = 0
MAX_FOLLOWED = 40
"""Links that Linux follows on one path; more are an error (ELOOP)."""
_WINDOW = 31
"""zlib's number for a gzip stream with the largest window."""


class BadArchive(Damaged):
    """An archive that is not the one that was named, or that is not unpacked for safety."""


def pack(directory: Path, names: Iterable[str]) -> tuple[str, bytes]:
    """(name, archive) of files and links, which are relative to the directory. Raises OSError."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(names):
            path = directory / name
            entry = tarfile.TarInfo(name)
            entry.mtime = MODIFIED_S
            if path.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, str(path.readlink())
                tar.addfile(entry)
                continue
            data = path.read_bytes()
            executable = path.stat().st_mode & stat.S_IXUSR
            entry.size, entry.mode = len(data), 0o755 if executable else 0o644
            tar.addfile(entry, io.BytesIO(data))
    content = held.getvalue()
    return name_of(content), gzip.compress(content, mtime=_NO_TIME)


def name_of(content: bytes) -> str:
    """The name of a tar: 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def unpack(name: str, archive: bytes, directory: Path) -> None:
    """Unpack into a directory that exists and is empty. Raises BadArchive, and OSError."""
    content = _content(archive)
    if name_of(content) != name:
        raise BadArchive(f"code archive {name[:12]}: its content is another one")
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            _extract(tar, directory)
    except (tarfile.TarError, ValueError) as error:  # a name may hold a zero byte
        raise BadArchive(f"code archive: no tar ({error})") from None


def _extract(tar: tarfile.TarFile, directory: Path) -> None:
    entries = tar.getmembers()
    if len(entries) > limits.MAX_CODE_FILES:
        raise BadArchive(f"code archive: more than {limits.MAX_CODE_FILES} files")
    links = {str(PurePosixPath(e.name)): e.linkname for e in entries if e.issym()}
    for entry in entries:
        _check(entry, links)
    # Links come last, so that no file is written through one.
    for entry in (e for e in entries if e.isreg()):
        _write(tar, entry, directory / entry.name)
    for entry in (e for e in entries if e.issym()):
        path = directory / entry.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(entry.linkname)


def _content(archive: bytes) -> bytes:
    """The tar in an archive, of bounded size whatever the archive claims."""
    try:
        stream = zlib.decompressobj(_WINDOW)
        content = stream.decompress(archive, limits.MAX_CODE_BYTES + 1)
    except zlib.error as error:
        raise BadArchive(f"code archive: damaged ({error})") from None
    if len(content) > limits.MAX_CODE_BYTES:
        raise BadArchive(f"code archive: unpacks to more than {limits.MAX_CODE_BYTES} bytes")
    return content


def _check(entry: tarfile.TarInfo, links: Mapping[str, str]) -> None:
    """A sparse file is rejected: a few bytes of an archive stand for any number in the file."""
    plain = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse()
    if not (plain or entry.issym()):
        raise BadArchive(f"code archive: {entry.name} is neither a file nor a link")
    above = [str(parent) for parent in PurePosixPath(entry.name).parents]
    if not is_inside(entry.name) or any(parent in links for parent in above):
        raise BadArchive(f"code archive: {entry.name} leads out of its directory")
    if entry.issym() and not links_inside(entry.name, entry.linkname, links):
        raise BadArchive(f"code archive: {entry.name} leads out of its directory")


def _write(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(entry)
    assert source is not None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    with os.fdopen(descriptor, "wb") as file:
        file.write(source.read())
        os.fchmod(descriptor, 0o755 if entry.mode & stat.S_IXUSR else 0o644)
    os.utime(path, (MODIFIED_S, MODIFIED_S))


def is_inside(name: str) -> bool:
    """True if a name is relative and stays below its directory."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def links_inside(name: str, target: str, links: Mapping[str, str] = MappingProxyType({})) -> bool:
    """True if a link's target is relative and, from the link's own place, below the directory, also
    through the other links there. A circle of links leads nowhere."""
    place = list(PurePosixPath(name).parts[:-1])
    parts, num_followed = [target], 0
    while parts:
        first, *rest = PurePosixPath(parts.pop()).parts or (".",)
        parts += ["/".join(rest)] * bool(rest)
        if first == "/" or (first == ".." and not place):
            return False
        if first == "..":
            place.pop()
        elif first != ".":
            place.append(first)
        if (link := links.get("/".join(place))) is not None and first != "..":
            place.pop()
            num_followed += 1
            if num_followed > MAX_FOLLOWED:
                return True
            parts.append(link)
    return True

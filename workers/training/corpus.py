"""A corpus: the documents of a source one after another, as one sequence of tokens.

Text has one token per byte, and END_OF_DOCUMENT after each file. Files of tokens are taken as they
are, with the separators that the tokenizer wrote. Nothing is held in memory but the list of files.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import files

STDLIB = "stdlib"
MAX_STDLIB_BYTES = 8 * 2**20
"""Enough text for a small model, in about 600 files."""
END_OF_DOCUMENT = 255
"""The byte that occurs in no UTF-8 text, so a vocabulary of 256 has a token to spare."""
FIELD = "spec.entrypoint.recipe.config.data.source"
_SKIPPED_DIRECTORIES = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
_STORED = {"text": np.uint8, "uint16": np.uint16, "uint32": np.uint32}

Tokens = npt.NDArray[np.int64]


class Corpus:
    """The tokens of a source."""

    def __init__(
        self, source: str, directory: str, stored: str = "text", vocab_size: int = 256,
        field: str = FIELD,
    ) -> None:  # fmt: skip
        """`source` is stdlib, or a file or directory, relative to `directory`; `stored` is
        data.format. Raises UserError if it cannot be read, or is not a file of such tokens."""
        self.source, self._field, self._vocab_size = source, field, vocab_size
        self._dtype = np.dtype(_STORED[stored]).newbyteorder("<")
        self._separated = int(stored == "text")
        self._files, sizes = [], []
        for path, num_bytes in _documents(source, directory, stored, field):
            tokens, rest = divmod(num_bytes, self._dtype.itemsize)
            if rest:
                raise UserError(
                    f"{field}: got {num_bytes} bytes in {path}; expected a multiple of "
                    f"{self._dtype.itemsize}, as data.format is {stored}; a file of tokens has "
                    f"them in little-endian order and nothing else"
                )
            if tokens:
                self._files.append(path)
                sizes.append(tokens + self._separated)
        self._begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        """Number of tokens, with separators."""
        return int(self._begins[-1])

    def read(self, first: int, count: int) -> Tokens:
        """Tokens first to first + count - 1. Raises UserError for a token outside the vocabulary,
        and for a file that cannot be read or became shorter."""
        out = np.empty(count, dtype=np.int64)
        number = int(np.searchsorted(self._begins, first, side="right")) - 1
        done = 0
        while done < count:
            at, end = first + done, int(self._begins[number + 1])
            size = min(end - at, count - done)
            stored = min(size, end - self._separated - at)
            out[done : done + stored] = self._part(number, at - int(self._begins[number]), stored)
            out[done + stored : done + size] = END_OF_DOCUMENT
            done, number = done + size, number + 1
        return out

    def _part(self, number: int, at: int, count: int) -> Tokens:
        path = self._files[number]
        try:
            part = np.fromfile(path, self._dtype, count, offset=at * self._dtype.itemsize)
        except OSError as error:
            raise _unreadable(self._field, self.source, error) from None
        if len(part) < count:
            raise UserError(
                f"{self._field}: got {at + len(part)} tokens in {path}; expected more, as when "
                "the worker began; files of data must not change while a job trains"
            )
        if count and int(part.max()) >= self._vocab_size:
            where = int(part.argmax())
            raise UserError(
                f"{self._field}: got token {int(part[where])} at position {at + where} of {path}; "
                f"expected tokens below model.vocabSize ({self._vocab_size}); raise vocabSize, or "
                "correct data.format"
            )
        return part.astype(np.int64)


def _documents(
    source: str, directory: str, stored: str, field: str
) -> list[tuple[Path, int]]:  # fmt: skip
    """(file, bytes) in the order of their names."""
    if source == STDLIB:
        return _stdlib()
    try:
        path = files.resolve(directory, source)
        if not path.is_dir():
            return [(path, path.stat().st_size)]
        pattern = "*" if stored == "text" else "*.bin"
        listed = sorted(file for file in path.rglob(pattern) if file.is_file())
        if not listed and stored != "text":
            raise UserError(
                f"{field}: got the directory {source} without a .bin file; expected files of "
                f"tokens called NAME.bin, as data.format is {stored}"
            )
        return [(file, file.stat().st_size) for file in listed]
    except OSError as error:
        raise _unreadable(field, source, error) from None


def _unreadable(field: str, source: str, error: OSError) -> UserError:
    return UserError(
        f"{field}: got {source!r}, which cannot be read ({error.filename}: {error.strerror}); "
        "expected stdlib, or a file or directory relative to the spec file's workingDirectory"
    )


@functools.cache
def _stdlib() -> list[tuple[Path, int]]:
    """Cached: a worker forked from a warm process inherits it."""
    root, sources, room = Path(sysconfig.get_path("stdlib")), [], MAX_STDLIB_BYTES
    for path in _stdlib_files(root):
        size = path.stat().st_size
        room -= size + 1
        if room < 0:
            break
        sources.append((path, size))
    if not sources:
        raise UserError(
            f"{FIELD}: got stdlib, but {root} has no .py files; expected an installation with its "
            "source; name a file or directory instead"
        )
    return sources


def _stdlib_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_DIRECTORIES)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)

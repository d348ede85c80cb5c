"""Paths as people write them in a spec.

Owns: what they are relative to, and the meaning of ~. Must not: look at any file.
"""

from __future__ import annotations

import errno
from pathlib import Path


def resolve(directory: Path | str, *written: str) -> Path:
    """Each relative to the one before; one that is absolute, or begins with ~ for the home of
    whoever asks, starts anew. Raises FileNotFoundError where ~ is nobody's home."""
    path = Path(directory)
    for one in written:
        try:
            path /= Path(one).expanduser()
        except RuntimeError:  # no such user, or one without a home
            raise FileNotFoundError(errno.ENOENT, "no home is known here for its ~", one) from None
    return path

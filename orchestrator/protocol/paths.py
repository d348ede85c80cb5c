"""Paths as people write them in a spec.

Owns: what they are relative to, and the meaning of ~. Must not: look at any file.
"""

from __future__ import annotations

from pathlib import Path


def resolve(directory: Path | str, *written: str) -> Path:
    """Each relative to the one before; one that is absolute, or begins with ~ for the home of
    whoever asks, starts anew."""
    path = Path(directory)
    for one in written:
        path /= Path(one).expanduser()
    return path

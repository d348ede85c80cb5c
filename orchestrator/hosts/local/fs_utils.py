"""Whole directories: copied to another file system, and deleted.

Owns: that a copy is all there or not there, and that a deletion goes on beside others. Must not:
know what is in them.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol.atomic_files import sync_directory


def copy(source: Path, place: Path) -> None:
    """To another file system; durable when this returns. Has the name only when all of it is there:
    what is killed meanwhile leaves a `.NAME.HEX.partial`. Raises OSError; what had the name has
    it still."""
    partial = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")
    try:
        shutil.copytree(source, partial)
        os.sync()
        if os.path.lexists(place):  # a rename would replace an empty directory
            raise OSError(errno.EEXIST, "exists")
        partial.rename(place)
    except shutil.Error as error:  # a list of (from, to, why)
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(errno.EIO, str(error.args[0][0][2])) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(place.parent)


def clear(path: Path) -> None:
    """Delete it, beside others that do the same. Raises HoldfastError for what is left."""
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # somebody else was faster
        except OSError as error:
            raise HoldfastError(f"{path}: cannot be removed ({error.strerror})") from None

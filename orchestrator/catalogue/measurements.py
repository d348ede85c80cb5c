"""The user's file of measurements, <home>/calibration.json.

`holdfast spec plan --calibrate` adds an entry; every later plan of a job on the same kind of device
reads it, and so do the controllers of this home's jobs. A file that cannot be read is reported and
not used: nothing is refused for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.orchestrator.catalogue.calibration import Calibration, CalibrationEntry
from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.protocol.files import replace

FILE = "calibration.json"
SMALLEST_FACTOR, LARGEST_FACTOR = 0.01, 1000.0
"""Beyond these a measurement, or the file, is wrong."""


class Measurements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's content."""

    version: int = 1
    entries: tuple[CalibrationEntry, ...] = ()


def read(home: Path, report: Callable[[str], object]) -> tuple[CalibrationEntry, ...]:
    """The measurements of this user; none, and a message to `report`, if the file is damaged."""
    path = home / FILE
    try:
        measurements = msgspec.json.decode(path.read_bytes(), type=Measurements)
        if wrong := [entry for entry in measurements.entries if not is_sane(entry.calibration)]:
            raise ValueError(f"a factor of {wrong[0].key.device} is not between 0.01 and 1000")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        why = error.strerror if isinstance(error, OSError) else str(error)
        expected = "what `holdfast spec plan --calibrate` has written; planned without it"
        fix = "delete the file, or calibrate again"
        report(str(Problem("calibration", f"{path} ({why})", expected, fix)))
        return ()
    return measurements.entries


def is_sane(one: Calibration) -> bool:
    """True if a measurement can be one."""
    factors = all(
        SMALLEST_FACTOR <= value <= LARGEST_FACTOR for value in (one.block, one.head, one.optimizer)
    )
    return factors and (one.link is None or (one.link.bandwidth > 0 and one.link.latency >= 0))


def write(home: Path, entries: Sequence[CalibrationEntry]) -> None:
    """Raises UserError if the file cannot be written."""
    path = home / FILE
    text = msgspec.json.format(msgspec.json.encode(Measurements(entries=tuple(entries))))
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(path, text + b"\n")
    except OSError as error:
        got = f"{path} ({error.strerror})"
        raise UserError.of("calibration", got, "a file that can be written") from None

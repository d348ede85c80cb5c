"""Reads the catalogue: the files beside this module, and over them a file of the user.

The user's file adds entries, or replaces single fields of entries that exist. Its invariant: a
catalogue that was loaded has only complete entries, and only links that exist.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from ..errors import Problem, UserError
from ..planner.model import Architecture
from .entries import SECTIONS, inconsistent, lacking, read_fields
from .types import Device, Link

FILE_VARIABLE = "HOLDFAST_CATALOGUE"
"""Path of the user's catalogue file."""
BUILT_IN = ("links.yaml", "devices.yaml", "architectures.yaml")
NEAREST = 3
ADD_IT = f"use one of these, or add it to the catalogue file of {FILE_VARIABLE}"
DEVICES = "devices, as COUNTxDEVICE such as 64xH100-80"

# The C parser is several times faster; not every build of PyYAML has it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", Device, Link, Architecture)


class CatalogueError(UserError):
    """Wrong entries of a catalogue file, or of a model's configuration; the message lists all."""

    def __init__(self, problems: list[Problem], source: str) -> None:
        self.problems = problems
        plural = "s" if len(problems) != 1 else ""
        head = f"{source}: {len(problems)} problem{plural}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in problems)]))


class UnknownEntry(UserError):
    """A name that the catalogue does not have."""


class Catalogue(NamedTuple):
    """Devices, links and architectures by name. In a look-up, case does not count, and a dash, a
    low line and a space are the same."""

    devices: dict[str, Device]
    links: dict[str, Link]
    architectures: dict[str, Architecture]
    names: dict[str, dict[str, str]]
    """Section -> name or alias, normalised -> name."""
    file: str = ""
    """The user's file; empty: none."""

    def device(self, name: str) -> Device:
        """The device with this name, alias or driver's name. Raises UnknownEntry."""
        return self._find("device", self.devices, "devices", name)

    def link(self, name: str) -> Link:
        """The link with this name or alias. Raises UnknownEntry."""
        return self._find("link", self.links, "links", name)

    def architecture(self, name: str) -> Architecture:
        """The architecture with this name or alias. Raises UnknownEntry."""
        return self._find("architecture", self.architectures, "architectures", name)

    def reported(self, name: str) -> Device | None:
        """The device that a driver calls so. Where no entry has exactly this name, the one with the
        longest name that stands in it as whole words: "NVIDIA H100 80GB HBM2e" is an H100-80. None:
        not known, or a part of a device (MIG), whose peak is not that of the device."""
        words = normalised(name).split("-")
        if "mig" in words:
            return None
        for length in range(len(words), 0, -1):
            for start in range(len(words) - length + 1):
                device = self.names["devices"].get("-".join(words[start : start + length]))
                if device is not None:
                    return self.devices[device]
        return None

    def _find(self, what: str, entries: Mapping[str, Kind], section: str, name: str) -> Kind:
        names = self.names[section]
        entry = names.get(normalised(name))
        if entry is None:
            raise UnknownEntry.of(what, repr(name), _nearest(name, names), ADD_IT)
        return entries[entry]


def normalised(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip()).casefold()


def _nearest(name: str, names: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(normalised(name), names, n=4 * NEAREST, cutoff=0.5)
    best = list(dict.fromkeys(names[spelling] for spelling in close))[:NEAREST]
    if best:
        return f"a name of the catalogue; the nearest: {', '.join(best)}"
    return f"one of {', '.join(dict.fromkeys(names.values()))}"


def parse_devices(text: str, catalogue: Catalogue) -> tuple[int, Device]:
    """The number and kind of devices of "64xH100-80". Raises UserError."""
    match = re.fullmatch(r"\s*(\d*)\s*([xX*]?)\s*(.*?)\s*", text)
    count, times, name = match.groups() if match else ("", "", "")
    if not times or not name or not count:
        names = catalogue.names["devices"]
        whole = names.get(normalised(text)) or names.get(normalised(name))
        kind, number = whole or "H100-80", count or "1"
        raise UserError.of("devices", repr(text), DEVICES, f"write {number}x{kind}")
    if int(count) == 0:
        raise UserError.of("devices", repr(text), "one device or more", f"write 1x{name}")
    return int(count), catalogue.device(name)


# -- loading -----------------------------------------------------------------------------------
def load_catalogue(extra: Path | None = None) -> Catalogue:
    """The catalogue, with the user's file over it: `extra`, otherwise that of HOLDFAST_CATALOGUE,
    otherwise ~/.config/holdfast/catalogue.yaml where there is one. Raises CatalogueError for wrong
    entries, UserError for a file that cannot be read."""
    merged = _Merged()
    for name in BUILT_IN:
        merged.add(Path(__file__).with_name(name))
    user = extra or _file_of_the_user()
    if user is not None:
        merged.add(user)
    return merged.catalogue(str(user or ""))


@functools.cache
def catalogue_or_built_in() -> Catalogue:
    """The catalogue for a process that only shows numbers and must not end because of a wrong file
    of the user: it uses the built-in one then, and logs why."""
    try:
        return load_catalogue()
    except UserError as error:
        logger.warning("the catalogue of Holdfast alone is used: %s", error)
        merged = _Merged()
        for name in BUILT_IN:
            merged.add(Path(__file__).with_name(name))
        return merged.catalogue("")


def _file_of_the_user() -> Path | None:
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named).expanduser()
    usual = Path.home() / ".config" / "holdfast" / "catalogue.yaml"
    return usual if usual.is_file() else None


def _read(file: Path) -> object:
    try:
        with file.open("rb") as stream:
            return yaml.load(stream, Loader=_LOADER)
    except OSError as error:
        fix = f"correct {FILE_VARIABLE}" if os.environ.get(FILE_VARIABLE) == str(file) else ""
        why = f"{file} ({error.strerror or error})"
        raise UserError.of("catalogue", why, "a YAML file that can be read", fix) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        text = " ".join(str(error).split())
        problem = Problem("catalogue", text, "YAML with devices, links or architectures")
        raise CatalogueError([problem], str(file)) from error


class _Merged:
    """The entries of the files that were read so far."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in SECTIONS}
        """Section -> name -> attributes."""
        self._names: dict[str, dict[str, str]] = {name: {} for name in SECTIONS}

    def add(self, file: Path) -> None:
        written = _read(file)
        problems: list[Problem] = []
        if not isinstance(written, dict) or not written:
            expected = f"entries below {', '.join(SECTIONS)}"
            problems.append(Problem("catalogue", repr(written), expected))
            written = {}
        for section, entries in written.items():
            if section not in SECTIONS:
                got = f"the unknown section {section!r}"
                problems.append(Problem("catalogue", got, f"one of {', '.join(SECTIONS)}"))
            elif not isinstance(entries, dict) or not entries:
                expected = "entries, each a name with fields"
                problems.append(Problem(str(section), repr(entries), expected))
            else:
                for name, fields in entries.items():
                    self._enter(str(section), name, fields, problems)
        if not problems:
            self._check(problems)
        if problems:
            raise CatalogueError(problems, str(file))

    def _enter(self, section: str, name: object, written: object, problems: list[Problem]) -> None:
        path = f"{section}.{name}"
        if not isinstance(name, str) or not name.strip():
            fix = f'write "{name}": in quotes'
            problems.append(Problem(path, repr(name), "a text as name", fix))
            return
        names, fields = self._names[section], SECTIONS[section].fields
        name = names.get(normalised(name), name)
        entry = self._found[section].setdefault(name, {"name": name})
        entry |= read_fields(path, written, fields, problems)
        lacking(path, entry, fields, problems)
        for spelling in (name, *entry.get("aliases", ())):
            owner = names.setdefault(normalised(spelling), name)
            if owner != name:
                fix = f"leave it out, or give the fields below {owner}"
                expected = "an alias of one entry only"
                problems.append(
                    Problem(f"{path}.aliases", f"{spelling}, which is {owner}", expected, fix)
                )

    def _check(self, problems: list[Problem]) -> None:
        links = self._names["links"]
        for name, entry in self._found["devices"].items():
            if normalised(entry["link"]) not in links:
                expected = f"a link of the catalogue: {', '.join(self._found['links'])}"
                problems.append(Problem(f"devices.{name}.link", entry["link"], expected))
        for name, entry in self._found["architectures"].items():
            problems += inconsistent(f"architectures.{name}", Architecture(**entry))

    def catalogue(self, file: str) -> Catalogue:
        devices, links, architectures = (
            {name: SECTIONS[section].type(**entry) for name, entry in self._found[section].items()}
            for section in ("devices", "links", "architectures")
        )
        return Catalogue(devices, links, architectures, self._names, file)  # type: ignore[arg-type]

"""The lines of `spec.environment`, with the files that `-r` and `-c` name in their place.

Read in one way before a job starts and on its nodes, and the same for pip and uv: paths of these
files are relative to the file that names them, as both installers have it, and all others to the
working directory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..api.v1alpha1.workload import PythonPackages
from . import files

_NESTED = re.compile(r"(?:-(?P<short>[rc])\s*|--(?P<long>requirement|constraint)s?[\s=]\s*)(.+)")
_FIND_LINKS = re.compile(r"(?:-f\s*|--find-links[\s=]\s*)(.+)")
_CONTINUED = re.compile(r"\\\r?\n")
_COMMENT = re.compile(r"(^|\s)#.*$")
_ELSEWHERE = ("://", "${")
"""In a name that only the installer can resolve: a URL, or a variable of the node."""


class RequirementsUnreadable(Exception):
    """`got`: which file, and why it cannot be read."""

    def __init__(self, field: str, got: str) -> None:
        super().__init__(f"{field}: {got}")
        self.field, self.got = field, got


class RequirementFile(NamedTuple):
    path: Path
    written: str
    field: str
    """Of the spec, that leads to it."""
    text: str


class RequirementLines(NamedTuple):
    requirements: list[str]
    """Without comments and empty lines; requirements and options of installers."""
    constraints: list[str]
    files: list[RequirementFile]
    """That they come from."""


def read(packages: PythonPackages, work: Path, *, of_nodes: bool = True) -> RequirementLines:
    """All lines, in a job's working directory `work`; without `of_nodes` not those of files with an
    absolute path, which only the nodes have to have. Raises RequirementsUnreadable."""
    reader = _LineReader(work, of_nodes)
    if packages.file is not None:
        reader.read(packages.file, _Origin(work))
    text = "".join(f"{line}\n" for line in packages.requirements)
    reader.take(text, _Origin(work, "requirements"))
    return reader.found


class _Origin(NamedTuple):
    """Of the name of a file."""

    base: Path
    """To which it is relative."""
    named_by: str = ""
    constraints: bool = False


class _LineReader:
    def __init__(self, work: Path, of_nodes: bool) -> None:
        self._work, self._of_nodes = work, of_nodes
        self.found = RequirementLines([], [], [])

    def read(self, written: str, origin: _Origin) -> None:
        field = "spec.environment" if origin.named_by else "spec.environment.file"
        if not self._of_nodes and written.startswith(("/", "~")):
            return
        try:
            path = files.resolve(origin.base, written).absolute()
            if any(path == one.path for one in self.found.files):
                return  # a second time, or it names itself
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not a text"
            by = f", which {origin.named_by} names" if origin.named_by else ""
            raise RequirementsUnreadable(field, f"{written}{by} ({why})") from None
        self.found.files.append(RequirementFile(path, written, field, text))
        self.take(text, _Origin(path.parent, written, origin.constraints))

    def take(self, text: str, origin: _Origin) -> None:
        """The lines of a file or of the spec; `origin`: of the names in them."""
        for written in _CONTINUED.sub("", text).splitlines():
            line = _COMMENT.sub("", written).strip()
            nested = _NESTED.fullmatch(line)
            name = nested[3].strip("\"' ").removeprefix("file://") if nested else ""
            if nested and not any(part in name for part in _ELSEWHERE):
                limits = origin.constraints or "c" in (nested["short"], (nested["long"] or "")[:1])
                self.read(name, origin._replace(constraints=limits))
            elif line:
                lines = self.found.constraints if origin.constraints else self.found.requirements
                lines.append(self._with_links(line, origin.base))

    def _with_links(self, line: str, base: Path) -> str:
        """Installers look for a directory of wheels beside the file that names it, too."""
        links = _FIND_LINKS.fullmatch(line)
        if links and base != self._work and "://" not in links[1] and (base / links[1]).exists():
            return f"--find-links {base / links[1]}"
        return line

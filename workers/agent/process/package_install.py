"""Installs `spec.environment` on a node: once for all jobs with the same requirements.

An environment of Holdfast's own Python, in which that Python's packages can be seen too, so that
torch is not installed a second time. uv does not see them: what they provide is taken out of its
resolution, unless a line asks for another version. pip does so by itself. A lock of the file system
lets one process install at a time, and a file that is written last marks an environment that is
complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import site
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.protocol import files, requirement_files
from holdfast.orchestrator.protocol.requirement_files import (
    RequirementLines,
    RequirementsUnreadable,
)

from ..pool import package_path

COMPLETE = "holdfast-complete"
LAST_LINES = 8
"""Of the installer's output, in an error."""
_LOCAL = re.compile(r"^-[ercf]\b|^--(editable|requirement|constraint|find-links)\b")
"""Options with a path, which may be one of this node."""
_NAMES_A_PACKAGE = re.compile(r"[^-]|-e\b|--editable\b|-r\b|--requirement\b")
_OPTIONS = re.compile(r"\s--?\w.*$")
"""After a requirement, such as its hashes."""
_EDITABLE_FIRST = (
    "import sys; sys.meta_path.sort(key=lambda finder: "
    "not getattr(finder, '__module__', '').startswith('__editable__'))\n"
)
"""A line of a .pth file: setuptools finds what is installed with -e behind all directories, and so
behind a package of that name in Holdfast's own Python."""
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tar.bz2", ".tar.xz", ".tgz")


class Installed(NamedTuple):
    directory: Path
    seconds: float = 0.0
    """How long it took; 0: it was there."""
    installer: str = ""


def ready(job: TrainingJob, spec_directory: str, cache: Path) -> Installed:
    """The environment with a job's packages, below the directory `cache`. Blocks. Raises UserError
    with the installer's last lines."""
    packages = job.spec.environment
    assert packages is not None
    try:
        work = files.resolve(spec_directory, job.spec.working_directory).absolute()
    except FileNotFoundError:
        work = Path(spec_directory).absolute()  # the worker reports it
    try:
        lines = requirement_files.read(packages, work)
    except RequirementsUnreadable as error:
        problem = Problem(error.field, f"{error.got} on this node", "a file of every node")
        raise UserError(str(problem)) from None
    directory = cache / "environments" / _key(lines, work)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (directory / COMPLETE).exists():
                return Installed(directory)
            shutil.rmtree(directory, ignore_errors=True)  # of an installation that was cut short
            begin = time.monotonic()
            installer = _install(directory, lines, work)
            files.replace(directory / COMPLETE, b"")
            return Installed(directory, time.monotonic() - begin, installer)
    except OSError as error:
        got = f"{directory} ({error.strerror})"
        expected = "a directory of the node that can be written"
        raise UserError(str(Problem("spec.environment", got, expected))) from None


def _key(lines: RequirementLines, work: Path) -> str:
    """Names an environment: of one Python with its packages, since images that share a cache may
    have others. One with paths belongs to the directory that they begin in."""
    # By the names of their directories, NAME-VERSION.dist-info: this is done in each recovery, and
    # to read what they contain takes 0.1 s.
    here = {path.name for place in sys.path for path in Path(place).glob("*-info")}
    parts = [sys.version, sys.prefix, *sorted(here), *lines.requirements, "", *lines.constraints]
    parts += [one.text for one in lines.files]
    if any(_is_local(line) for line in [*lines.requirements, *lines.constraints]):
        parts.append(str(work))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_local(line: str) -> bool:
    """Whether it has a path, which is relative to the working directory."""
    if line.startswith("-"):
        return bool(_LOCAL.search(line))
    named = _parsed(line)
    url = line if named is None else named.url
    return url is not None and ("://" not in url or "file:" in url)


def _install(directory: Path, lines: RequirementLines, work: Path) -> str:
    """The name of the installer."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(directory)], work)
    seen = package_path.packages_of(directory) / "holdfast-parent.pth"
    parents = [*site.getsitepackages(), *_user_site()]
    # As code: the .pth files of these directories (editable installations) are read, too.
    lines_of = [f"import site; site.addsitedir({place!r})\n" for place in parents]
    seen.write_text(_EDITABLE_FIRST + "".join(lines_of), encoding="utf-8")
    python, uv = str(directory / "bin" / "python"), _uv()
    more = []
    if lines.constraints:
        more = ["--constraint", str(_written(directory / "constraints.txt", lines.constraints))]
    if uv is None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        wanted = _written(directory / "requirements.txt", lines.requirements)
        _run([*pip, "install", "--no-input", "--requirement", str(wanted), *more], work)
        return "pip"
    wanted_lines, asked = _asked(lines)
    asked |= _names_of_paths(uv, directory, lines, work)
    # An override that never applies leaves a package out.
    found = {canonicalize_name(one.name) for one in importlib.metadata.distributions() if one.name}
    left_out = [f"{name} ; python_version < '0'" for name in sorted(found - asked)]
    overrides = _written(directory / "overrides.txt", left_out)
    words = [uv, "pip", "install", "--python", python, "--override", str(overrides)]
    _run([*words, "--requirement", "-", *more], work, _text(wanted_lines))
    return "uv"


def _written(path: Path, lines: list[str]) -> Path:
    path.write_text(_text(lines), encoding="utf-8")
    return path


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _user_site() -> list[str]:
    return [site.getusersitepackages()] if site.ENABLE_USER_SITE else []


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else shutil.which("uv")


def _asked(lines: RequirementLines) -> tuple[list[str], set[str]]:
    """(the requirements, with those of extras of what Holdfast's own Python has; the names of
    which a line wants another version than that)."""
    wanted, asked = list(lines.requirements), set[str]()
    for line in wanted:  # it grows
        named = _parsed(line)
        if named is None or not _applies(named):
            continue
        if named.url is not None or not _is_here(named):
            asked.add(canonicalize_name(named.name))
        elif named.extras:
            wanted += [one for one in _of_extras(named) if one not in wanted]
    for line in lines.constraints:
        named = _parsed(line)
        if named is not None and _applies(named) and not _is_here(named):
            asked.add(canonicalize_name(named.name))
    return wanted, asked


def _parsed(line: str) -> Requirement | None:
    """A requirement with a name; None: an option, a path or a URL."""
    text = _OPTIONS.sub("", line)
    if text.endswith(_ARCHIVES) and "@" not in text:
        return None
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def _applies(named: Requirement) -> bool:
    return named.marker is None or named.marker.evaluate()


def _is_here(named: Requirement) -> bool:
    """Whether Holdfast's own Python has a version that it allows."""
    try:
        version = importlib.metadata.version(named.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return named.url is None and named.specifier.contains(version, prereleases=True)


def _of_extras(named: Requirement) -> list[str]:
    """What the extras of an installed package need beside it. What they need anyway is here."""
    found = []
    for line in importlib.metadata.requires(named.name) or ():
        one = Requirement(line)
        marker, one.marker = one.marker, None
        if marker is None or marker.evaluate({"extra": ""}):
            continue
        if any(marker.evaluate({"extra": extra}) for extra in named.extras):
            found.append(str(one))
    return found


def _names_of_paths(uv: str, directory: Path, lines: RequirementLines, work: Path) -> set[str]:
    """The names of what lines give by a path or a URL, which only the installer can tell."""
    places = [
        line for line in lines.requirements
        if _NAMES_A_PACKAGE.match(line) and _parsed(line) is None
    ]  # fmt: skip
    if not places:
        return set()
    options = [line for line in lines.requirements if not _NAMES_A_PACKAGE.match(line)]
    lock = directory / "pylock.asked.toml"
    words = [uv, "pip", "compile", "--python", str(directory / "bin" / "python"), "--no-deps"]
    words += ["--format", "pylock.toml", "--output-file", str(lock), "-"]
    _run(words, work, _text([*options, *places]))
    packages = tomllib.loads(lock.read_text(encoding="utf-8")).get("packages", [])
    return {canonicalize_name(one["name"]) for one in packages}


def _run(words: list[str], work: Path, given: str = "") -> None:
    """Run an installer with `given` as its standard input. Raises UserError."""
    what = " ".join(Path(word).name for word in words[:3] if not word.startswith("--"))
    try:
        done = subprocess.run(
            words, cwd=work, input=given.encode(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=limits.INSTALL_S, check=False,
            env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        got = f"{what}, which has not ended within {limits.INSTALL_S:g} s"
        raise UserError(str(Problem("spec.environment", got, "less to install"))) from None
    if done.returncode:
        text = done.stdout.decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        got = f"{what}, which ended with exit code {done.returncode}"
        expected = "requirements that can be installed on every node"
        detail = "\n".join(text)
        raise UserError(f"{Problem('spec.environment', got, expected)}\n{detail}")

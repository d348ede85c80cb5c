"""Installs `spec.environment` on a node: once for all jobs with the same requirements.

An environment of Holdfast's own Python, in which that Python's packages can be seen too, so that
torch is not installed a second time. uv does not see them: what they provide, and no line asks for,
is taken out of its resolution. A lock of the file system lets one process install at a time, and a
file that is written last marks an environment that is complete.
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
from pathlib import Path
from typing import NamedTuple

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.workload import PythonPackages
from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.protocol import files

from ..pool import package_path

COMPLETE = "holdfast-complete"
LAST_LINES = 8
"""Of the installer's output, in an error."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LOCAL = re.compile(r"^\.{0,2}/|file:|^-[ercf]\b|^--(editable|requirement|constraint|find-links)\b")


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
    lines = _lines(packages, work)
    directory = cache / "environments" / _key(lines, work)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (directory / COMPLETE).exists():
                return Installed(directory)
            shutil.rmtree(directory, ignore_errors=True)  # of an installation that was cut short
            begin = time.monotonic()
            installer = _install(directory, packages, lines, work)
            files.replace(directory / COMPLETE, b"")
            return Installed(directory, time.monotonic() - begin, installer)
    except OSError as error:
        got = f"{directory} ({error.strerror})"
        expected = "a directory of the node that can be written"
        raise UserError(str(Problem("spec.environment", got, expected))) from None


def _lines(packages: PythonPackages, work: Path) -> list[str]:
    """All lines of the requirements. Raises UserError."""
    found: list[str] = []
    if packages.file is not None:
        try:
            path = files.resolve(work, packages.file)
            found = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not a text"
            got = f"{packages.file} ({why} on this node)"
            problem = Problem("spec.environment.file", got, "a requirements file of every node")
            raise UserError(str(problem)) from None
    return [*found, *packages.requirements]


def _key(lines: list[str], work: Path) -> str:
    """Names an environment: of one Python with its packages, since images that share a cache may
    have others. One with paths belongs to the directory that they begin in."""
    # By the names of their directories, NAME-VERSION.dist-info: this is done in each recovery, and
    # to read what they contain takes 0.1 s.
    here = {path.name for place in sys.path for path in Path(place).glob("*-info")}
    parts = [sys.version, sys.prefix, *sorted(here), *lines]
    if any(_LOCAL.search(line.strip()) for line in lines):
        parts.append(str(work))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _install(directory: Path, packages: PythonPackages, lines: list[str], work: Path) -> str:
    """The name of the installer."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(directory)], work)
    seen = package_path.packages_of(directory) / "holdfast-parent.pth"
    parents = [*site.getsitepackages(), *_user_site()]
    # As code: the .pth files of these directories (editable installations) are read, too.
    lines_of = [f"import site; site.addsitedir({place!r})\n" for place in parents]
    seen.write_text("".join(lines_of), encoding="utf-8")
    text = "".join(f"{line}\n" for line in packages.requirements)
    more = ["--requirement", str(files.resolve(work, packages.file))] if packages.file else []
    python, uv = str(directory / "bin" / "python"), _uv()
    if uv is None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        wanted = directory / "requirements.txt"  # pip takes its paths from `work`, if not from here
        wanted.write_text(text, encoding="utf-8")
        _run([*pip, "install", "--no-input", "--requirement", str(wanted), *more], work)
        return "pip"
    overrides = directory / "overrides.txt"
    overrides.write_text("".join(_provided(lines)), encoding="utf-8")
    words = [uv, "pip", "install", "--python", python, "--override", str(overrides)]
    _run([*words, "--requirement", "-", *more], work, text)
    return "uv"


def _user_site() -> list[str]:
    return [site.getusersitepackages()] if site.ENABLE_USER_SITE else []


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else shutil.which("uv")


def _provided(lines: list[str]) -> list[str]:
    """Overrides that leave out what Holdfast's own Python has and no line asks for."""
    asked = {_normal(match[0]) for line in lines if (match := _NAME.match(line.strip()))}
    found = {_normal(one.name) for one in importlib.metadata.distributions() if one.name}
    return [f"{name} ; python_version < '0'\n" for name in sorted(found - asked)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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

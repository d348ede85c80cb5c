"""Which files of a directory go to a cluster as a job's code: those that git would keep, without
secrets.

Git itself says which files are ignored; in a directory that is in no repository, the names in
CACHES are left out too. Secrets are left out by name, also where git keeps them; each is named to
the user.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .. import limits
from ..errors import Problem, UserError
from ..protocol import code_archive

SECRET_DIRECTORIES = (".git", ".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", "gcloud")
SECRET_FILES = (
    ".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk",
    "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".pypirc",
    ".npmrc", ".pgpass", ".git-credentials", ".htpasswd", ".boto", ".s3cfg", ".vault-token",
    "kubeconfig", "kubeconfig.*", "*.kubeconfig", "credentials", "credentials.json",
    "*service-account*.json", "*service_account*.json", "application_default_credentials.json",
)  # fmt: skip
"""Patterns of file names, in any case."""
EXAMPLES = (".env.example", ".env.sample", ".env.template")
CACHES = (
    "__pycache__", "*.pyc", ".venv", "venv", "node_modules", ".hg", ".svn", ".tox", ".nox",
    ".ipynb_checkpoints", "*.egg-info", ".*_cache", "wandb", "mlruns",
)  # fmt: skip
"""Of files and directories that are no code, where git does not say it."""
NAMED = 5
"""So many files are named in a message."""
HEADER_BYTES = 3072
"""Of a file in a tar, at most: header, long name, padding."""
GIT_S = 60.0


class Code(NamedTuple):
    """A packed directory."""

    name: str
    """SHA-256 of its content."""
    archive: bytes
    files: tuple[str, ...]
    remarks: tuple[str, ...]
    """What was left out, as sentences for the user."""


def pack(directory: Path) -> Code:
    """The code in a directory. Raises UserError for one that is too large or cannot be read."""
    left_out: dict[str, list[str]] = {}
    chosen: dict[str, int] = {}
    for name in sorted(set(_listed(directory))):
        if why := _refused(directory, name):
            left_out.setdefault(why, []).append(name)
            continue
        try:
            chosen[name] = os.lstat(directory / name).st_size
        except FileNotFoundError:  # git keeps it, the work tree does not have it
            continue
    tar_bytes = sum(chosen.values()) + HEADER_BYTES * len(chosen)
    _expect_small(directory, chosen, tar_bytes, limits.MAX_CODE_BYTES)
    try:
        digest, archive = code_archive.pack(directory, chosen)
    except OSError as error:
        got = f"{error.filename} ({error.strerror})"
        fix = "make it readable, or name it in .gitignore"
        raise UserError(str(Problem("code", got, "files that can be read", fix))) from None
    _expect_small(directory, chosen, len(archive), limits.MAX_CODE_ARCHIVE_BYTES, " compressed")
    remarks = tuple(f"not uploaded, {why}: {_few(names)}" for why, names in left_out.items())
    return Code(digest, archive, tuple(chosen), remarks)


def _expect_small(
    directory: Path, chosen: dict[str, int], num_bytes: int, limit: int, how: str = ""
) -> None:
    many = len(chosen) > limits.MAX_CODE_FILES
    if num_bytes <= limit and not many:
        return
    got = f"{_size(num_bytes)}{how} in {len(chosen)} files of {directory}"
    expected = f"at most {_size(limit)}{how} in {limits.MAX_CODE_FILES} files"
    largest = sorted(chosen, key=lambda name: -chosen[name])[:NAMED]
    named = ", ".join(f"{name} ({_size(chosen[name])})" for name in largest)
    fix = (
        f"the largest are {named}; name data and outputs in .gitignore, and keep them on storage "
        f"that the pods have"
    )
    raise UserError(str(Problem("code", got, expected, fix)))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 // 10 else f"{num_bytes} bytes"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# -- what is left out ---------------------------------------------------------------------------
def _refused(directory: Path, name: str) -> str:
    """Why a file is not taken along; empty: it is."""
    if is_secret(name):
        return "because the name is one of secrets"
    path = directory / name
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    if stat.S_ISLNK(mode):
        inside = code_archive.links_inside(name, str(path.readlink()))
        return "" if inside else "because the link leads out of the directory"
    return "" if stat.S_ISREG(mode) else "because it is no regular file"


def is_secret(name: str) -> bool:
    """Whether a relative path has the name of a file or a directory that usually holds secrets."""
    *parents, last = name.lower().split("/")
    if any(parent in SECRET_DIRECTORIES for parent in parents) or last in SECRET_DIRECTORIES:
        return True
    return last not in EXAMPLES and _matches(last, SECRET_FILES)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# -- listing ------------------------------------------------------------------------------------
def _listed(directory: Path) -> Iterator[str]:
    """Relative names of the files that are not ignored. Raises UserError."""
    if shutil.which("git") is None:
        if any(directory.rglob(".gitignore")):
            got = f"{directory} with a .gitignore, and no git in PATH"
            raise UserError(str(Problem("code", got, "git, which reads it", "install git")))
        yield from _walked(directory)
        return
    patterns: tuple[str, ...] = ()
    inside = _git(directory, "rev-parse", "--is-inside-work-tree")
    if inside.returncode == 0:
        found = _git(directory, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        patterns = CACHES[:2]
    elif b"not a git repository" in inside.stderr:
        found, patterns = _as_git_would(directory), CACHES
    else:
        found = inside
    if found.returncode:
        got = f"{directory} ({found.stderr.decode(errors='replace').strip()})"
        raise UserError(str(Problem("code", got, "a directory that git can read")))
    for word in filter(None, found.stdout.split(b"\0")):
        name = os.fsdecode(word).rstrip("/")
        if any(_matches(part, patterns) for part in name.split("/")):
            continue
        path = directory / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or a repository of its own
            yield from (f"{name}/{inner}" for inner in _listed(path))
        else:
            yield name


def _as_git_would(directory: Path) -> subprocess.CompletedProcess[bytes]:
    """What git would list if this directory, which is in no repository, were one."""
    from .targets.tempdir import scratch

    with scratch("holdfast-code-") as place:
        _git(place, "init", "--quiet", "--bare", ".")
        where = (f"--git-dir={place}", f"--work-tree={directory}")
        return _git(directory, *where, "ls-files", "-z", "--others", "--exclude-standard")


def _git(directory: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", *words], cwd=directory, env=environment | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        got = f"{directory}, which git has not listed within {GIT_S:g} s"
        raise UserError(str(Problem("code", got, "a smaller directory"))) from None


def _walked(root: Path) -> Iterator[str]:
    """Without git."""

    def fail(error: OSError) -> None:
        got = f"{error.filename} ({error.strerror})"
        raise UserError(str(Problem("code", got, "a directory that can be read"))) from None

    for parent, directories, names in os.walk(root, onerror=fail):
        directories[:] = [one for one in directories if not _matches(one, CACHES)]
        linked = [one for one in directories if Path(parent, one).is_symlink()]
        for name in (*names, *linked):
            if not _matches(name, CACHES):
                yield str(Path(parent, name).relative_to(root))

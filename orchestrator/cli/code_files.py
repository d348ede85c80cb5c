"""Files of a directory that go to a cluster as a job's code: those that git would keep, without
secrets.

Git itself says which files are ignored; in a directory that is in no repository, the names in
CACHES are left out too. Secrets are left out by name, also where git keeps them; each is named to
the user. A secret in a file of another name is not found.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .. import limits
from ..errors import UserError, few
from ..protocol import code_archive

SECRET_DIRECTORIES = (
    ".git", ".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", "gcloud", ".env", ".envs",
    "secrets", ".secrets",
)  # fmt: skip
SECRET_FILES = (
    ".env*", "*.env", "env.prod*", "env.dev*", "env.stag*", "env.local*", "*.pem", "*.key", "*.p8",
    "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", ".netrc", "_netrc", ".pypirc", ".npmrc", ".pgpass", ".my.cnf", ".htpasswd",
    ".boto", ".s3cfg", "kubeconfig", "kubeconfig.*", "*.kubeconfig", ".dockercfg",
    ".dockerconfigjson", ".databrickscfg", ".modal.toml", ".terraformrc", "*.tfvars",
    "*.tfvars.json", "*.tfstate", "*.tfstate.*", "kaggle.json", "*accesskeys*.csv", "rootkey.csv",
    "*service-account*.json", "*service_account*.json",
)  # fmt: skip
"""Patterns of file names, in any case."""
SECRET_WORDS = frozenset((
    "secret", "secrets", "credential", "credentials", "password", "passwords", "passwd",
    "passphrase", "apikey", "apikeys",
))  # fmt: skip
"""Words of names such as client_secret_1.json; beside them `api key`, and `token` at the end."""
CODE_SUFFIXES = frozenset((
    "py", "pyi", "pyx", "pxd", "ipynb", "sh", "bash", "c", "h", "cc", "hh", "cpp", "hpp", "cxx",
    "cu", "cuh", "go", "rs", "js", "ts", "java", "lua", "jl", "r", "jinja", "j2", "html", "css",
    "md", "rst", "safetensors", "parquet", "arrow", "npy", "npz",
))  # fmt: skip
"""Files of programs, texts and data, whose names may have these words."""
BACKUPS = ("~", ".bak", ".backup", ".old", ".orig", ".save", ".swp", ".swo")
"""Suffixes of copies that editors and people make."""
EXAMPLES = (".example", ".sample", ".template", ".dist")
"""Suffixes of files that have no secrets yet."""
ALWAYS = ("__pycache__", "*.pyc", ".holdfast-job-*.yaml")
"""Left out also where git keeps them: caches, and the spec that the Python client writes."""
CACHES = (
    ".venv", "venv", "node_modules", ".hg", ".svn", ".tox", ".nox",
    ".ipynb_checkpoints", "*.egg-info", ".*_cache", "wandb", "mlruns",
)  # fmt: skip
"""Files and directories that are not code, where git does not know."""
NAMED = 5
"""Files named in a message, at most."""
RAY_IGNORE = ".rayignore"
"""Ray's own file of that kind. It is read for every cluster: the first code of a job on Ray and an
edited one have the same files."""
HEADER_BYTES = 3072
"""Overhead of a file in a tar, at most: header, long name, padding."""
GIT_S = 60.0


class Chosen(NamedTuple):
    """Files of a directory that are taken along."""

    sizes: dict[str, int]
    """Relative name of a file or a link -> bytes."""
    remarks: tuple[str, ...]
    """Sentences for the user about files that were left out."""


class Code(NamedTuple):
    """A packed directory."""

    name: str
    """SHA-256 of its content."""
    archive: bytes
    files: tuple[str, ...]
    remarks: tuple[str, ...]


def choose(directory: Path, excludes: tuple[str, ...] = ()) -> Chosen:
    """The code in a directory, without what patterns as in .gitignore name. Raises UserError."""
    left_out: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name in sorted(set(_listed(directory, excludes))):
        if why := _refused(directory, name):
            left_out.setdefault(why, []).append(name)
            continue
        try:
            sizes[name] = os.lstat(directory / name).st_size
        except (FileNotFoundError, NotADirectoryError):  # git keeps it, the work tree does not
            continue
    return Chosen(sizes, tuple(remark(why, names) for why, names in left_out.items()))


def pack(directory: Path) -> Code:
    """The code in a directory. Raises UserError for one that is too large or cannot be read."""
    chosen, remarks = choose(directory)
    tar_bytes = sum(chosen.values()) + HEADER_BYTES * len(chosen)
    _expect_small(directory, chosen, tar_bytes, limits.MAX_CODE_BYTES)
    with readable():
        digest, archive = code_archive.pack(directory, chosen)
    _expect_small(directory, chosen, len(archive), limits.MAX_CODE_ARCHIVE_BYTES, " compressed")
    return Code(digest, archive, tuple(chosen), remarks)


@contextmanager
def readable() -> Iterator[None]:
    """Turns a file that cannot be read into a UserError."""
    try:
        yield
    except OSError as error:
        got = f"{error.filename} ({error.strerror})"
        fix = "make it readable, or name it in .gitignore"
        raise UserError.of("code", got, "files that can be read", fix) from None


def remark(why: str, names: list[str]) -> str:
    """Names files that are left out."""
    return f"not uploaded, {why}: {few(names, NAMED)}"


def _expect_small(
    directory: Path, chosen: dict[str, int], num_bytes: int, limit: int, how: str = ""
) -> None:
    many = len(chosen) > limits.MAX_CODE_FILES
    if num_bytes <= limit and not many:
        return
    expected = f"at most {_size(limit)}{how} in {limits.MAX_CODE_FILES} files"
    raise too_large(directory, chosen, f"{_size(num_bytes)}{how}", expected)


def too_large(directory: Path, chosen: Mapping[str, int], got: str, expected: str) -> UserError:
    """`chosen`: the files with their sizes."""
    largest = sorted(chosen, key=lambda name: -chosen[name])[:NAMED]
    named = ", ".join(f"{name} ({_size(chosen[name])})" for name in largest)
    fix = (
        f"the largest are {named}; name data and outputs in .gitignore, and keep them on storage "
        f"that the nodes have"
    )
    got = f"{got} in {len(chosen)} files of {directory}"
    return UserError.of("code", got, expected, fix)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 // 10 else f"{num_bytes} bytes"


# -- what is left out ---------------------------------------------------------------------------
def _refused(directory: Path, name: str) -> str:
    """Reason why a file is not uploaded; empty: it is."""
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
    return "" if stat.S_ISREG(mode) else "because it is not a regular file"


def is_secret(name: str) -> bool:
    """True if a relative path has the name of a file or a directory that usually holds secrets."""
    *parents, last = name.lower().split("/")
    if any(part in SECRET_DIRECTORIES for part in (*parents, last)):
        return True
    while last.endswith(BACKUPS):
        last = next(last.removesuffix(suffix) for suffix in BACKUPS if last.endswith(suffix))
    if last.endswith(EXAMPLES):
        return False
    plain = last.removeprefix(".")  # .id_rsa.swp is vim's copy of id_rsa
    return any(_matches(text, SECRET_FILES) for text in (last, plain)) or _has_secret_words(last)


def _has_secret_words(name: str) -> bool:
    stem, dot, suffix = name.lstrip(".").rpartition(".")
    if dot and suffix in CODE_SUFFIXES:
        return False
    words = re.split(r"[^a-z0-9]+", stem if dot else suffix)
    keys = set(itertools.pairwise(words)) & {("api", "key"), ("api", "keys")}
    return bool(keys) or words[-1] == "token" or not SECRET_WORDS.isdisjoint(words)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# -- listing ------------------------------------------------------------------------------------
def _listed(directory: Path, excludes: tuple[str, ...] = ()) -> Iterator[str]:
    """Relative names of the files that are not ignored. Raises UserError."""
    if shutil.which("git") is None:
        if excludes or any(any(directory.rglob(name)) for name in (".gitignore", RAY_IGNORE)):
            got = f"{directory} with a .gitignore, {RAY_IGNORE} or excludes, and no git in PATH"
            raise UserError.of("code", got, "git, which reads them", "install git")
        yield from _walked(directory)
        return
    with _repository(directory) as (where, patterns):
        wanted = ("--cached", "--others", "--exclude-standard")
        listed = _names(directory, where, *wanted)
        if excludes or any(name.split("/")[-1] == RAY_IGNORE for name in listed):
            options = (f"--exclude={pattern}" for pattern in excludes)
            ignored = ("--others", "--ignored", f"--exclude-per-directory={RAY_IGNORE}", *options)
            with _empty_repository(directory) as other:  # in which patterns begin in `directory`
                listed -= _names(directory, other, *ignored)
    for name in listed:
        if any(_matches(part, patterns) for part in name.split("/")):
            continue
        path = directory / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or a repository of its own
            yield from (f"{name}/{inner}" for inner in _listed(path, excludes))
        else:
            yield name


@contextmanager
def _repository(directory: Path) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(options with which git lists the directory, patterns of what is left out beside it). A
    directory that is in no repository is listed as if it were one. Raises UserError."""
    inside = _git(directory, "rev-parse", "--is-inside-work-tree")
    if inside.returncode == 0:
        yield (), ALWAYS
    elif b"not a git repository" in inside.stderr:
        with _empty_repository(directory) as where:
            yield where, (*ALWAYS, *CACHES)
    else:
        raise _unreadable_by_git(directory, inside)


@contextmanager
def _empty_repository(directory: Path) -> Iterator[tuple[str, ...]]:
    from .targets.tempdir import scratch

    with scratch("holdfast-code-") as place:
        _git(place, "init", "--quiet", "--bare", ".")
        yield (f"--git-dir={place}", f"--work-tree={directory}")


def _names(directory: Path, where: tuple[str, ...], *options: str) -> set[str]:
    output = _git(directory, *where, "ls-files", "-z", *options)
    if output.returncode:
        raise _unreadable_by_git(directory, output)
    return {os.fsdecode(word).rstrip("/") for word in filter(None, output.stdout.split(b"\0"))}


def _unreadable_by_git(directory: Path, done: subprocess.CompletedProcess[bytes]) -> UserError:
    got = f"{directory} ({done.stderr.decode(errors='replace').strip()})"
    return UserError.of("code", got, "a directory that git can read")


def _git(directory: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", *words], cwd=directory, env=environment | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        got = f"{directory}, which git has not listed within {GIT_S:g} s"
        raise UserError.of("code", got, "a smaller directory") from None


def _walked(root: Path) -> Iterator[str]:
    """Files of a directory outside git."""

    def fail(error: OSError) -> None:
        got = f"{error.filename} ({error.strerror})"
        raise UserError.of("code", got, "a directory that can be read") from None

    for parent, directories, names in os.walk(root, onerror=fail):
        directories[:] = [child for child in directories if not _matches(child, (*ALWAYS, *CACHES))]
        linked = [child for child in directories if Path(parent, child).is_symlink()]
        for name in (*names, *linked):
            if not _matches(name, (*ALWAYS, *CACHES)):
                yield str(Path(parent, name).relative_to(root))

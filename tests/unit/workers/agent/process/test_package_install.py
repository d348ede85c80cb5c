"""Packages of a job: installed once, without a network, from wheels that the test writes."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.api.v1alpha1.workload import PythonPackages
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import requirement_files
from holdfast.workers.agent.pool import package_path
from holdfast.workers.agent.process import package_install
from tests.unit.api.wrong_jobs import job as document
from tests.unit.api.wrong_jobs import script

OFFLINE = ("--no-index", "--find-links ./wheels")


def wheel(directory: Path, name: str, version: str, *requires: str) -> None:
    """A package whose module has its version."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", f"VERSION = {version!r}\n")
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        file.writestr(f"{info}/METADATA", head + needs)
        tag = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\n{tag}")
        file.writestr(f"{info}/RECORD", "")


def job(*lines: str, **more: str) -> TrainingJob:
    environment = {"requirements": [*OFFLINE, *lines], **more}
    return job_from_mapping(document(script(environment=environment)))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A job's directory with wheels: one needs torch, which Holdfast's Python has."""
    work = tmp_path / "work"
    wheel(work / "wheels", "hftiny", "1.0", "torch>=2", "numpy")
    wheel(work / "wheels", "hftiny", "2.0", "nowhere")
    wheel(work / "wheels", "msgspec", "99.0")
    return work


@pytest.fixture(params=["uv", "pip"])
def installer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pip":
        monkeypatch.setattr(package_install, "_uv", lambda: None)
    elif package_install._uv() is None:
        pytest.skip("uv is not installed")
    return str(request.param)


def printed(environment: Path, code: str) -> str:
    return subprocess.run(
        [environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_what_holdfast_has_is_not_installed_again(
    work: Path, tmp_path: Path, installer: str
) -> None:
    made = package_install.ready(job("hftiny==1.0"), str(work), tmp_path)
    assert made.installer == installer and made.seconds > 0
    code = "import hftiny, msgspec; print(hftiny.VERSION, msgspec.__file__)"
    version, place = printed(made.directory, code).split()
    assert version == "1.0" and not place.startswith(str(tmp_path))
    again = package_install.ready(job("hftiny==1.0"), str(work), tmp_path)
    assert (again.directory, again.seconds) == (made.directory, 0.0)


ENTER = """
import sys
from pathlib import Path
import msgspec
from holdfast.workers.agent.pool import package_path
print(package_path.enter(Path(sys.argv[1])))
import hftiny
print(hftiny.VERSION)
"""
WHEEL = "wheels/msgspec-99.0-py3-none-any.whl"
MSGSPEC = "import msgspec; print(getattr(msgspec, 'VERSION', 'ours'))"
LIBRARY = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "msgspec"
version = "99.0"
[tool.setuptools]
packages = ["msgspec"]
"""


@pytest.mark.parametrize(
    ("installer", "lines", "more"),
    [
        pytest.param("uv", ["-r base.txt"], {}, id="nested"),
        pytest.param("uv", ["--requirement=deep/more.txt"], {}, id="nested twice"),
        pytest.param("uv", [], {"file": "deep/more.txt"}, id="nested in the file"),
        pytest.param("uv", ["hftiny==1.0", "msgspec", "-c base.txt"], {}, id="constraint"),
        pytest.param("uv", [f"./{WHEEL}"], {}, id="wheel"),
        pytest.param("uv", [f"msgspec @ file://WORK/{WHEEL}"], {}, id="url"),
        pytest.param("uv", ["msgspec>=98 ; python_version > '3'"], {}, id="specifier"),
        pytest.param("uv", ["-e ./lib"], {}, id="editable"),
        # pip is slow, and reads the others by itself.
        pytest.param("pip", ["-r deep/more.txt"], {}, id="pip: nested twice"),
        pytest.param("pip", ["hftiny==1.0", "msgspec", "-c base.txt"], {}, id="pip: constraint"),
    ],
    indirect=["installer"],
)
def test_a_version_that_a_line_names_is_installed_wherever_the_line_is(
    work: Path, tmp_path: Path, installer: str, monkeypatch: pytest.MonkeyPatch,
    lines: list[str], more: dict[str, str],
) -> None:  # fmt: skip
    """What builds `./lib` without an index takes setuptools from here."""
    monkeypatch.setenv("UV_NO_BUILD_ISOLATION", "1")
    (work / "deep").mkdir()
    (work / "deep" / "more.txt").write_text("-r ../base.txt\n")
    (work / "base.txt").write_text("msgspec==99.0  # ours is older\n")
    (work / "lib" / "msgspec").mkdir(parents=True)
    (work / "lib" / "pyproject.toml").write_text(LIBRARY)
    (work / "lib" / "msgspec" / "__init__.py").write_text("VERSION = '99.0'\n")
    given = job(*(line.replace("WORK", str(work)) for line in lines), **more)
    made = package_install.ready(given, str(work), tmp_path)
    assert printed(made.directory, MSGSPEC) == "99.0"
    words = [sys.executable, "-c", ENTER, str(made.directory)]
    forked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert forked.stdout.split()[0] == "False", "Holdfast's msgspec is imported already"


@pytest.mark.parametrize(
    ("installer", "line"),
    [
        ("uv", "msgspec"), ("uv", "msgspec>=0.1"), ("uv", "msgspec[yaml]"),
        ("uv", "msgspec==99.0 ; python_version < '3'"), ("pip", "msgspec[yaml]"),
    ],
    indirect=["installer"],
)  # fmt: skip
def test_what_holdfasts_python_has_satisfies_a_line_with_both_installers(
    work: Path, tmp_path: Path, installer: str, line: str
) -> None:
    made = package_install.ready(job("hftiny==1.0", line), str(work), tmp_path)
    assert printed(made.directory, MSGSPEC) == "ours"


def test_what_an_extra_needs_beside_an_installed_package_is_installed(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(work / "wheels", "hfbase", "1.0", "hftiny==1.0 ; extra == 'more'", "numpy")
    base = package_install.ready(job("hfbase"), str(work), tmp_path / "first")
    monkeypatch.syspath_prepend(str(package_path.packages_of(base.directory)))
    found = package_install._asked(
        requirement_files.read(PythonPackages(requirements=("hfbase[more]",)), work)
    )
    assert found == (["hfbase[more]", "hftiny==1.0"], {"hftiny"})


@pytest.mark.parametrize("option", ["-r", "-c"])
def test_another_nested_file_is_another_environment(
    work: Path, tmp_path: Path, option: str
) -> None:
    (work / "requirements.txt").write_text(f"hftiny==1.0\nmsgspec\n{option} base.txt\n")
    (work / "base.txt").write_text("msgspec>=0.1\n")
    given = job(file="requirements.txt")
    first = package_install.ready(given, str(work), tmp_path)
    assert printed(first.directory, MSGSPEC) == "ours"
    (work / "base.txt").write_text("msgspec>=98\n")
    second = package_install.ready(given, str(work), tmp_path)
    assert second.directory != first.directory
    assert printed(second.directory, MSGSPEC) == "99.0"


def test_a_nested_file_that_is_not_there_is_named(work: Path, tmp_path: Path) -> None:
    (work / "requirements.txt").write_text("-r base.txt\n")
    expected = r"environment: got base\.txt, which requirements\.txt names \(No such file.* on this"
    with pytest.raises(UserError, match=expected):
        package_install.ready(job(file="requirements.txt"), str(work), tmp_path)


def test_another_file_of_requirements_is_another_environment(work: Path, tmp_path: Path) -> None:
    (work / "requirements.txt").write_text("hftiny==1.0\n")
    given = job(file="requirements.txt")
    first = package_install.ready(given, str(work), tmp_path)
    (work / "requirements.txt").write_text("hftiny==1.0  # another line\n")
    assert package_install.ready(given, str(work), tmp_path).directory != first.directory
    (work / "requirements.txt").unlink()
    with pytest.raises(UserError, match=r"environment\.file: got requirements\.txt"):
        package_install.ready(given, str(work), tmp_path)


def test_what_cannot_be_installed_has_the_installers_words_and_leaves_nothing(
    work: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"(?s)spec\.environment: got .*exit code.*nowhere"):
        package_install.ready(job("hftiny==2.0"), str(work), tmp_path)
    wheel(work / "wheels", "nowhere", "1.0")
    made = package_install.ready(job("hftiny==2.0"), str(work), tmp_path)
    assert made.seconds > 0, "it is tried again"


def test_two_jobs_at_once_install_once(work: Path, tmp_path: Path) -> None:
    found: list[package_install.Installed] = []

    def install() -> None:
        found.append(package_install.ready(job("hftiny==1.0"), str(work), tmp_path))

    threads = [threading.Thread(target=install) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.directory for one in found}) == 1
    assert sorted(one.seconds > 0 for one in found) == [False, False, True]


def test_a_forked_worker_gets_them_unless_one_takes_the_place_of_an_import(
    work: Path, tmp_path: Path
) -> None:
    made = package_install.ready(job("hftiny==1.0"), str(work), tmp_path)
    other = package_install.ready(job("hftiny==1.0", "msgspec==99.0"), str(work), tmp_path)
    found = []
    for one in (made, other):
        words = [sys.executable, "-c", ENTER, str(one.directory)]
        found.append(subprocess.run(words, capture_output=True, text=True, check=False))
    assert found[0].stdout.split() == ["True", "1.0"]
    assert found[1].stdout.split() == ["False"], "msgspec is imported already"
    assert printed(other.directory, "import msgspec; print(msgspec.VERSION)") == "99.0"
    assert package_path.packages_of(other.directory).is_dir()


def test_an_image_with_other_packages_has_another_environment(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images may share a cache; what is left out as provided is another thing in each."""
    spec = job("hftiny==1.0")
    first = package_install.ready(spec, str(work), tmp_path / "cache")
    assert package_install.ready(spec, str(work), tmp_path / "cache").directory == first.directory
    wheel(tmp_path / "made", "hfmore", "1.0")
    with zipfile.ZipFile(next((tmp_path / "made").glob("*.whl"))) as file:
        file.extractall(tmp_path / "more")
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    assert package_install.ready(spec, str(work), tmp_path / "cache").directory != first.directory

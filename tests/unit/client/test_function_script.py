"""The script and the pickle that are written for a function, and what is rejected by name."""

import functools
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.client.function_script import write_script
from holdfast.orchestrator.errors import UserError

MODEL = Fraction(1, 2)
LOCK = threading.Lock()


class Writer:
    def __init__(self, text: str) -> None:
        self.text = text

    def write(self, place: Path) -> None:
        place.write_text(f"{self.text} {MODEL}")


def closure(text: str) -> Any:
    def inner(place: Path) -> None:
        Writer(text).write(place)

    return inner


def write(place: Path, *, text: str) -> None:
    closure(text)(place)


def run(script: Path) -> "subprocess.CompletedProcess[str]":
    """Run the script where this module cannot be imported."""
    command = [sys.executable, str(script)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("function", "kwargs"),
    [
        (write, {"text": "a"}),
        (closure("a"), {}),
        (Writer("a").write, {}),
        (lambda place: Writer("a").write(place), {}),
        (functools.partial(write, text="a"), {}),
    ],
    ids=["function", "closure", "method", "lambda", "object"],
)
def test_a_script_calls_the_function_with_objects_that_it_refers_to(
    function: Any, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    done = run(write_script(tmp_path, function, (place,), kwargs))
    assert done.returncode == 0, done.stderr
    assert place.read_text() == "a 1/2"


def test_modules_beside_a_notebook_go_with_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "beside"
    package = place / "beside_the_notebook"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("def text(number):\n    return 'text ' * number\n")
    (place / "main_part.py").write_text(
        "from beside_the_notebook import part\ndef work():\n    print(part.text(2))\n"
    )
    monkeypatch.syspath_prepend(place)
    import main_part  # type: ignore[import-not-found]

    done = run(write_script(tmp_path, main_part.work, (), {}))
    assert (done.returncode, done.stdout) == (0, "text text \n"), done.stderr


def test_a_script_loads_nothing_when_it_is_imported_or_another_python_runs_it(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, write, (tmp_path / "place",), {"text": "a"})
    assert run(script).returncode == 0 and (tmp_path / "place").exists()
    (tmp_path / "place").unlink()
    imported = f"import runpy; runpy.run_path({str(script)!r}, run_name='imported')"
    subprocess.run([sys.executable, "-c", imported], check=True)
    assert not (tmp_path / "place").exists()
    own = "{}.{}".format(*sys.version_info)
    text = script.read_text()
    assert f"Python {own}" in text
    script.write_text(text.replace(str(sys.version_info[:2]), "(2, 7)"))
    done = run(script)
    assert done.returncode == 1 and not (tmp_path / "place").exists()
    assert f"cannot be loaded by Python {own}; expected the same minor version" in done.stderr


def uses_a_lock() -> None:
    print(LOCK)


@pytest.mark.parametrize(
    ("function", "args", "what"),
    [
        (uses_a_lock, (), r"job: got an object that cannot be pickled \(cannot pickle '_thread"),
        (write, (), "args: got arguments with missing a required argument: 'place'"),
        (print, (LOCK,), "job: got an object that cannot be pickled"),
    ],
)
def test_what_cannot_be_pickled_is_rejected_by_name(
    function: Any, args: tuple[Any, ...], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=what):
        write_script(tmp_path, function, args, {})
    assert not list(tmp_path.iterdir())

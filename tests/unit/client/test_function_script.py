"""The script that is made of a function: what goes into it, and what is refused by name."""

import dataclasses
import json
import math as numbers
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn, randn

from holdfast.orchestrator.client.function_script import write_script
from holdfast.orchestrator.errors import UserError

SIZE = 3
OPEN_FILE = open
MODEL = nn.Linear(1, 1)


@dataclass
class Settings:
    size: int = SIZE

    def doubled(self) -> int:
        return double(self.size)


class Model(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)


def double(number: int) -> int:
    return number * 2


def train(place: str, *, rate: float = 0.1, names: tuple[str, ...] = ()) -> None:
    """Uses an import, a class, a function, a constant and its arguments."""
    size = Settings().doubled()
    shape = list(Model(size).layer(randn(2, size)).shape)
    found = {"rate": rate, "names": names, "shape": shape, "floor": numbers.floor(rate)}
    with OPEN_FILE(place, "w") as file:
        json.dump(found, file)


def uses_an_object() -> None:
    print(MODEL)


def uses_a_local_module() -> None:
    print(write_it)  # noqa: F821


def calls_itself(number: int = 2) -> int:
    return calls_itself(number - 1) if number else 0


def test_a_script_runs_the_function_with_what_it_refers_to(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    script = write_script(tmp_path, train, (str(place),), {"rate": 0.5, "names": ("a", "b")})
    assert script.name == "run_train.py"
    runpy.run_path(str(script), run_name="__main__")
    expected = {"rate": 0.5, "names": ["a", "b"], "shape": [2, 6], "floor": 0}
    assert json.loads(place.read_text()) == expected


def test_a_script_that_is_only_imported_does_not_run_the_function(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    runpy.run_path(str(write_script(tmp_path, train, (str(place),), {})), run_name="imported")
    assert not place.exists()


def test_a_function_inside_a_function_and_one_that_calls_itself_have_source(tmp_path: Path) -> None:
    def inner() -> None:
        print(dataclasses.fields(Settings), calls_itself())

    runpy.run_path(str(write_script(tmp_path, inner, (), {})), run_name="__main__")


def closure() -> Any:
    secret = object()

    def inner() -> None:
        print(secret)

    return inner


class Trainer:
    def fit(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "what"),
    [
        (lambda: None, (), "job: got a lambda"),
        (closure(), (), "inner, a closure over secret"),
        (Trainer.fit, (None,), "Trainer.fit, a method"),
        (print, (), "<built-in function print>; expected a function"),
        (uses_an_object, (), "uses_an_object: MODEL: got Linear("),
        (train, (), "args: got arguments with missing a required argument: 'place'"),
        (train, (Path("x"),), "args[0]: got PosixPath('x') (PosixPath); expected a number, a text"),
    ],
)
def test_what_has_no_source_is_refused_by_name(
    function: Any, args: tuple[Any, ...], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        write_script(tmp_path, function, args, {})
    assert what in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_module_that_is_not_installed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside_the_notebook  # type: ignore[import-not-found]

    monkeypatch.setitem(globals(), "write_it", beside_the_notebook)
    with pytest.raises(UserError, match="the module beside_the_notebook, which is not installed"):
        write_script(tmp_path, uses_a_local_module, (), {})

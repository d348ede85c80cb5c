"""Frameworks are adapted whenever they are imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from holdfast.workers.agent.pool import framework_hooks

SOURCE = """
class DeepSpeedEngine:
    def load_checkpoint(self, load_dir, tag=None):
        return load_dir, tag
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the module and the class that DeepSpeed has."""
    (tmp_path / "deepspeed" / "runtime").mkdir(parents=True)
    for folder in ("deepspeed", "deepspeed/runtime"):
        (tmp_path / folder / "__init__.py").touch()
    for name in ("deepspeed", "deepspeed.runtime", framework_hooks.ENGINE):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    engine = tmp_path / "deepspeed" / "runtime" / "engine.py"
    engine.write_text(SOURCE)
    return engine


def is_adapted() -> bool:
    engine = importlib.import_module(framework_hooks.ENGINE).DeepSpeedEngine
    return getattr(engine.load_checkpoint, "reads_other_sizes", False)


def test_an_import_of_the_script_is_adapted(package: Path) -> None:
    framework_hooks.install()
    assert is_adapted()
    waiting = [getattr(finder, "_name", "") for finder in sys.meta_path]
    assert framework_hooks.ENGINE not in waiting, "nothing is in the way of other imports"


def test_what_a_standby_has_imported_is_adapted(package: Path) -> None:
    assert not is_adapted()
    framework_hooks.install()
    assert is_adapted()
    function = importlib.import_module(framework_hooks.ENGINE).DeepSpeedEngine.load_checkpoint
    framework_hooks.install()
    again = importlib.import_module(framework_hooks.ENGINE).DeepSpeedEngine.load_checkpoint
    assert again is function, "once"


def test_a_script_without_deepspeed_has_its_own_error(package: Path) -> None:
    package.unlink()
    framework_hooks.install()
    with pytest.raises(ModuleNotFoundError, match=framework_hooks.ENGINE):
        importlib.import_module(framework_hooks.ENGINE)


def test_an_engine_that_cannot_be_adapted_works_as_before(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package.write_text("VERSION = 20\n")
    framework_hooks.install()
    assert importlib.import_module(framework_hooks.ENGINE).VERSION == 20
    assert "as many ranks as wrote them only (AttributeError" in capsys.readouterr().err


@pytest.mark.parametrize("again", [False, True])
def test_a_trainer_is_adapted_where_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    source = "class Trainer:\n    def train(self, resume_from_checkpoint=None):\n        pass\n"
    (tmp_path / "transformers" / "trainer.py").write_text(source)
    for name in ("transformers", framework_hooks.TRAINER):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is restored
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    if again:
        monkeypatch.setenv(framework_hooks.STARTED_AGAIN, "1")
    framework_hooks.install()
    train = importlib.import_module(framework_hooks.TRAINER).Trainer.train
    assert getattr(train, "goes_on", False) == again


def test_steps_of_transformers_are_counted_also_in_a_first_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").touch()
    methods = "".join(f"    def on_{name}(self): pass\n" for name in ("train_begin", "step_end"))
    (folder / "trainer_callback.py").write_text(f"class CallbackHandler:\n{methods}")
    for name in ("transformers", framework_hooks.CALLBACKS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv(framework_hooks.STARTED_AGAIN, raising=False)
    framework_hooks.install()
    handler = importlib.import_module(framework_hooks.CALLBACKS).CallbackHandler
    assert handler.on_step_end.counts_steps
    assert capsys.readouterr().err == ""

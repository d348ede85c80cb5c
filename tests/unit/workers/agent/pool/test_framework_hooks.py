"""Frameworks are adapted whenever they are imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol.environment import RESUME_SINCE
from holdfast.workers.agent.pool import framework_hooks
from holdfast.workers.integrations import patches

ENGINE = "deepspeed.runtime.engine"
SOURCE = """
class DeepSpeedEngine:
    def load_checkpoint(self, load_dir, tag=None):
        return load_dir, tag
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the module and the class that DeepSpeed has."""
    (tmp_path / "deepspeed" / "runtime").mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.2'\n")
    (tmp_path / "deepspeed" / "runtime" / "__init__.py").touch()
    monkeypatch.setattr(patches, "_left_alone", set())
    for name in ("deepspeed", "deepspeed.runtime", ENGINE):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    engine = tmp_path / "deepspeed" / "runtime" / "engine.py"
    engine.write_text(SOURCE)
    return engine


def is_adapted() -> bool:
    engine = importlib.import_module(ENGINE).DeepSpeedEngine
    return getattr(engine.load_checkpoint, "reads_other_sizes", False)


def test_an_import_of_the_script_is_adapted(package: Path) -> None:
    framework_hooks.install()
    assert is_adapted()
    waiting = [getattr(finder, "_name", "") for finder in sys.meta_path]
    assert ENGINE not in waiting, "nothing is in the way of other imports"


def test_what_a_standby_has_imported_is_adapted(package: Path) -> None:
    assert not is_adapted()
    framework_hooks.install()
    assert is_adapted()
    function = importlib.import_module(ENGINE).DeepSpeedEngine.load_checkpoint
    framework_hooks.install()
    again = importlib.import_module(ENGINE).DeepSpeedEngine.load_checkpoint
    assert again is function, "once"


def test_a_script_without_deepspeed_has_its_own_error(package: Path) -> None:
    package.unlink()
    framework_hooks.install()
    with pytest.raises(ModuleNotFoundError, match=ENGINE):
        importlib.import_module(ENGINE)


def test_an_engine_that_cannot_be_adapted_works_as_before(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package.write_text("VERSION = 20\n")
    framework_hooks.install()
    assert importlib.import_module(ENGINE).VERSION == 20
    shown = capsys.readouterr().err
    assert "deepspeed 0.19.2 is not patched (it is not as expected: " in shown
    assert "checkpoints are read by as many ranks as wrote them only" in shown


@pytest.mark.parametrize("again", [False, True])
def test_a_trainer_is_patched_where_it_is_started_again_and_counts_its_steps_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: bool
) -> None:
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '5.23.1'\n")
    source = "class Trainer:\n    def train(self, resume_from_checkpoint=None):\n        pass\n"
    (folder / "trainer.py").write_text(source)
    methods = "".join(f"    def on_{name}(self): pass\n" for name in ("train_begin", "step_end"))
    (folder / "trainer_callback.py").write_text(f"class CallbackHandler:\n{methods}")
    trainer, callback = "transformers.trainer", "transformers.trainer_callback"
    for name in ("transformers", trainer, callback):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is restored
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv(RESUME_SINCE, raising=False)
    if again:
        monkeypatch.setenv(RESUME_SINCE, "1")
    framework_hooks.install()
    train = importlib.import_module(trainer).Trainer.train
    assert getattr(train, "goes_on", False) == again
    assert importlib.import_module(callback).CallbackHandler.on_step_end.counts_steps
    assert capsys.readouterr().err == ""


def test_a_library_without_what_is_audited_is_imported_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "safetensors.py").write_text("__version__ = '9.0'\n")
    monkeypatch.delitem(sys.modules, "safetensors", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    framework_hooks.install()
    assert importlib.import_module("safetensors") is sys.modules.pop("safetensors")
    assert "safetensors is not patched (AttributeError: " in capsys.readouterr().err

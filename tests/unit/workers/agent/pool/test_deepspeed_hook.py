"""The engine of DeepSpeed is adapted whenever it is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from holdfast.workers.agent.pool import deepspeed_hook

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
    for name in ("deepspeed", "deepspeed.runtime", deepspeed_hook.ENGINE):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    engine = tmp_path / "deepspeed" / "runtime" / "engine.py"
    engine.write_text(SOURCE)
    return engine


def is_adapted() -> bool:
    engine = importlib.import_module(deepspeed_hook.ENGINE).DeepSpeedEngine
    return getattr(engine.load_checkpoint, "reads_other_sizes", False)


def test_an_import_of_the_script_is_adapted(package: Path) -> None:
    before = len(sys.meta_path)
    deepspeed_hook.install()
    assert is_adapted()
    assert len(sys.meta_path) == before


def test_what_a_standby_has_imported_is_adapted(package: Path) -> None:
    assert not is_adapted()
    deepspeed_hook.install()
    assert is_adapted()
    function = importlib.import_module(deepspeed_hook.ENGINE).DeepSpeedEngine.load_checkpoint
    deepspeed_hook.install()
    again = importlib.import_module(deepspeed_hook.ENGINE).DeepSpeedEngine.load_checkpoint
    assert again is function, "once"


def test_a_script_without_deepspeed_has_its_own_error(package: Path) -> None:
    package.unlink()
    deepspeed_hook.install()
    with pytest.raises(ModuleNotFoundError, match=deepspeed_hook.ENGINE):
        importlib.import_module(deepspeed_hook.ENGINE)


def test_an_engine_that_cannot_be_adapted_works_as_before(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package.write_text("VERSION = 20\n")
    deepspeed_hook.install()
    assert importlib.import_module(deepspeed_hook.ENGINE).VERSION == 20
    assert "as many ranks as wrote them only (AttributeError" in capsys.readouterr().err

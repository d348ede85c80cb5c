"""The modules that a script imports: of spec.preload, and learned ones for its standbys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import training_packages
from holdfast.workers.agent.pool import user_modules
from holdfast.workers.agent.pool.learned_imports import LearnedImports
from tests.documents import job_document


def _job(script: str = "train.py", **spec: object) -> TrainingJob:
    return job_from_mapping(job_document("learned", {"entrypoint": {"script": script}, **spec}))


def _kept(place: Path, job: TrainingJob | None = None) -> LearnedImports:
    imports = LearnedImports()
    imports.keep_in(str(place), job or _job())
    return imports


def test_what_was_learned_is_there_for_later_agents_of_the_same_script(tmp_path: Path) -> None:
    first = _kept(tmp_path)
    assert first.known() == ()
    first.learned(("transformers", "transformers.trainer"))
    assert _kept(tmp_path).known() == ("transformers", "transformers.trainer")
    assert _kept(tmp_path, _job("other.py")).known() == ()


def test_all_that_was_learned_is_kept_and_what_a_process_must_not_fork_with(tmp_path: Path) -> None:
    first = _kept(tmp_path)
    first.learned(("transformers", "wandb"))
    first.learned(("transformers", "peft"))  # another rank
    first.leave_out(("wandb",))
    first.leave_out(("wandb", "grpc"))
    second = _kept(tmp_path)
    assert second.known() == ("transformers", "wandb", "peft")
    assert second.left_out == ("wandb", "grpc")


def test_an_unwanted_file_is_not_written_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    _kept(tmp_path, _job(learnPreload=False)).learned(("transformers",))
    assert not list(tmp_path.rglob("*.json"))
    _kept(tmp_path).learned(("transformers",))
    (file,) = tmp_path.rglob("*.json")
    file.write_text("[", encoding="utf-8")
    assert _kept(tmp_path).known() == ()


def test_installed_modules_are_learned_but_not_the_users_own_nor_the_standard_library() -> None:
    known = [name for name in sys.modules if not name.startswith("msgspec")]
    found = user_modules.installed_since(frozenset(known))
    assert "msgspec" in found and all(name.startswith("msgspec") for name in found)
    everything = user_modules.installed_since(frozenset())
    assert not {"json", "os", __name__, "holdfast.workers"} & set(everything)


def test_a_standby_ignores_what_it_cannot_import() -> None:
    user_modules.import_after_fork(_job(), ("no_such_module_anywhere", "msgspec"))


def test_the_worker_names_a_module_that_cannot_be_imported() -> None:
    with pytest.raises(UserError) as refused:
        user_modules.expect_imported(_job(preload=["json", "no_such_module"]))
    assert str(refused.value) == (
        "spec.preload.1: got no_such_module (ModuleNotFoundError: No module named "
        "'no_such_module'); expected a module that can be imported on every node; install it "
        "there, or remove it from the list"
    )


def test_a_worker_needs_a_torch_that_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_packages, "OLDEST_TORCH", (99, 0))
    with pytest.raises(UserError, match="expected 99"):
        user_modules.expect_imported(_job())


def test_modules_of_the_spec_come_first_and_are_not_learned_again(tmp_path: Path) -> None:
    imports = _kept(tmp_path)
    imports.preload = ("trl",)
    imports.learned(("transformers", "trl"))
    assert imports.known() == ("trl", "transformers")
    assert _kept(tmp_path).known() == ("transformers",)

"""Checkpoint paths and their credentials: user errors, and secrets that are never printed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import parse_job
from holdfast.orchestrator.runtime.checkpoint_store.options import job_environment, storage_place

from .conftest import Holdfast

Write = Callable[[str], Path]

SPEC = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: demo}
spec:
  entrypoint: {script: train.py}
"""


def test_memory_urls_are_refused_because_processes_do_not_share_them(
    holdfast: Holdfast, write: Write
) -> None:
    result = holdfast("spec validate", write(SPEC + "  checkpoint: {path: memory://x}\n"))
    assert result.code == 2
    assert "spec.checkpoint.path: got memory://x; expected a directory or the URL" in result.err
    assert "a job has many" in result.err


def test_a_password_in_a_path_is_refused_and_not_repeated(holdfast: Holdfast, write: Write) -> None:
    path = "sftp://me:swordfish@host/x"
    result = holdfast("spec validate", write(SPEC + f"  checkpoint: {{path: {path}}}\n"))
    assert result.code == 2
    assert "spec.checkpoint.path: got sftp://... with a password in it" in result.err
    assert "swordfish" not in result.out + result.err


def test_a_store_without_its_driver_names_the_extra_that_installs_it(
    holdfast: Holdfast, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)  # if an earlier test opened it
    result = holdfast("run", write(SPEC + "  checkpoint: {path: s3://bucket/x}\n"))
    assert result.code == 2
    assert "spec.checkpoint.path: got s3://bucket/x" in result.err
    assert "pip install '.[s3]'" in result.err
    assert not Path(os.environ["HOLDFAST_HOME"]).exists()


def test_a_file_url_is_a_directory_relative_to_the_spec_like_any_other(tmp_path: Path) -> None:
    assert storage_place("file://out", tmp_path) == str(tmp_path / "out")
    assert storage_place(f"file://{tmp_path}/out", "/elsewhere") == str(tmp_path / "out")
    assert storage_place("out", tmp_path) == str(tmp_path / "out")
    assert storage_place("s3://bucket/out", tmp_path) == "s3://bucket/out"


def test_the_plan_shows_settings_but_no_secrets(holdfast: Holdfast, write: Write) -> None:
    env = "  env: {AWS_ENDPOINT_URL: 'http://store', AWS_SECRET_ACCESS_KEY: swordfish}\n"
    for more in (("--environment",), ("--json",)):
        result = holdfast("spec plan", write(SPEC + env), *more)
        assert result.code == 0
        assert "http://store" in result.out and "AWS_SECRET_ACCESS_KEY" in result.out
        assert "swordfish" not in result.out


def test_a_secret_of_a_wrong_type_is_not_repeated(holdfast: Holdfast, write: Write) -> None:
    result = holdfast("spec validate", write(SPEC + "  env: {MY_TOKEN: [123456789]}\n"))
    assert result.code == 2
    assert "spec.env.MY_TOKEN: got (hidden)" in result.err
    assert "123456789" not in result.out + result.err


def test_the_environment_of_a_job_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setenv("HF_TEST_ONE", "mine")
    job = parse_job(SPEC + "  env: {HF_TEST_ONE: its, HF_TEST_TWO: its, FSSPEC_DEMO_KEY: its}\n")
    with job_environment(job):
        assert (os.environ["HF_TEST_ONE"], os.environ["HF_TEST_TWO"]) == ("its", "its")
        assert fsspec.config.conf["demo"] == {"key": "its"}
    assert os.environ["HF_TEST_ONE"] == "mine" and "HF_TEST_TWO" not in os.environ
    assert "demo" not in fsspec.config.conf

"""spec.env reaches libraries that read variables once, before the job is known."""

from __future__ import annotations

import copy
import os

import fsspec.config
import pytest

from holdfast.workers.agent.process import process_env


def test_settings_of_stores_reach_fsspec_after_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.config, "conf", copy.deepcopy(fsspec.config.conf))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    job = {"FSSPEC_S3_ENDPOINT_URL": "http://store", "FSSPEC_": "nonsense", "OTHER": "x"}
    process_env.adopt(job)
    assert fsspec.config.conf["s3"]["endpoint_url"] == "http://store"
    assert os.environ["OTHER"] == "x"


def test_a_process_with_a_user_and_a_home_is_not_changed() -> None:
    usable = {"USER": "ada", "HOME": "/tmp"}
    here = dict(usable)
    process_env.complete(here)
    assert here["HOME"] == usable["HOME"] and here["USER"] == usable["USER"]

"""Checkpoint paths that an operator opens for each namespace, and their credentials."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.hosts.kubernetes.storage_access import (
    directory_above,
    problems,
    with_secret,
)
from holdfast.orchestrator.kube.errors import SECRETS
from holdfast.orchestrator.kube.names import Owner
from tests.unit.api.wrong_jobs import job, script
from tests.unit.kube.fake_api import FakeApi, cluster_of

ENDPOINT = {"AWS_ENDPOINT_URL": "http://10.0.0.1:9000"}
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
SETTINGS = PodSettings(
    "e:1",
    checkpoint_root="/checkpoints",
    checkpoint_prefixes={"team-a": ["s3://bucket-a"], "team-b": ["s3://secret-b"], "*": ["/data/"]},
    user_credentials={"team-a": ["http://10.0.0.1:9000/"], "team-b": ["http://secret-b"]},
)


def refused(
    path: str | None,
    *,
    env: dict[str, str] | None = None,
    secret: str | None = None,
    settings: PodSettings = SETTINGS,
    known: str = "",
) -> list[str]:
    checkpoint: dict[str, Any] = {"path": path, "secretName": secret}
    given = {name: value for name, value in checkpoint.items() if value is not None}
    return [str(one) for one in problems(team_job(given, env), settings, known)]


def team_job(checkpoint: dict[str, Any], env: dict[str, str] | None = None) -> TrainingJob:
    document = job(script(checkpoint=checkpoint, env=env or {}), "llm")
    document["metadata"]["namespace"] = "team-a"
    return job_from_mapping(document)


@pytest.mark.parametrize(
    "path",
    [None, "/checkpoints/team-a/llm", "file:///checkpoints/team-a/llm", "s3://bucket-a/x",
     "s3://bucket-a", "/data/x"],
)  # fmt: skip
def test_paths_below_the_root_and_the_prefixes_of_the_namespace_are_opened(
    path: str | None,
) -> None:
    assert refused(path) == []
    assert refused(path, env={"AWS_DEFAULT_REGION": "eu-1", "AWS_MAX_ATTEMPTS": "3"}) == []


@pytest.mark.parametrize(
    "path",
    ["/checkpoints/team-b/llm", "/checkpoints/team-ab", "/checkpoints/team-a/../team-b/x", "/etc",
     "/checkpoints/team-a", "/checkpoints/team-a/other", "/checkpoints/team-a/llm/evil",
     "/checkpoints", "//checkpoints/team-b/llm", "/data/./x", "/data//x", "/data2",
     "file:///etc", "s3://secret-b/x", "s3://bucket-ab/x", "http://10.0.0.1/x", "gs://any/x",
     "simplecache::s3://bucket-a/x", "ftp://host/x"],
)  # fmt: skip
def test_any_other_path_is_refused_without_a_word_on_other_namespaces(path: str) -> None:
    (text,) = refused(path)
    assert text.startswith(f"spec.checkpoint.path: got {path}")
    own = path.removeprefix("file://").startswith("/checkpoints") and ".." not in path
    assert ("leave it out" in text) == own
    assert "secret-b" not in text.removeprefix(f"spec.checkpoint.path: got {path}")


def test_a_path_of_another_bucket_needs_credentials_of_the_job() -> None:
    (text,) = refused("s3://mine/x")
    assert "spec.checkpoint.secretName" in text and "checkpoints.allowedPrefixes" in text
    assert refused("s3://mine/x", env=KEYS) == []
    assert refused("s3://mine/x", env={**KEYS, **ENDPOINT}) == []
    assert refused("s3://mine/x", secret="store") == []
    assert refused("gs://mine/x", secret="store") != []
    assert refused("s3://mine/x", env={**KEYS, "FSSPEC_S3_TOKEN": "t"}) == []


@pytest.mark.parametrize(
    "env",
    [ENDPOINT, {"AWS_ENDPOINT_URL_S3": "http://x"}, {"FSSPEC_S3_ENDPOINT_URL": "http://x"},
     {"FSSPEC_S3": '{"client_kwargs": {"endpoint_url": "http://x"}}'},
     {"FSSPEC_S3": '{"config_kwargs": {"proxies": {"http": "http://x"}}}'}],
    ids=["sdk", "sdk-s3", "fsspec", "client", "proxy"],
)  # fmt: skip
def test_an_endpoint_of_the_user_never_goes_with_the_operators_credentials(
    env: dict[str, str],
) -> None:
    (text,) = refused("s3://bucket-a/x", env=env)
    assert text.startswith("spec.env: got a variable that sets ") and "secretName" in text
    mine = {**env, **KEYS}
    if env == ENDPOINT:
        assert refused("s3://bucket-a/x", env=mine) == []
        assert refused("s3://bucket-a/x", env=env, secret="store") == []
    else:  # an endpoint that the chart does not list for this namespace, or a proxy
        (text,) = refused("s3://mine/x", env=mine)
        assert text.startswith("spec.env: got a variable that sets ")
        assert "checkpoints.userCredentials" in text and "http://x" not in text
        assert "secret-b" not in text
        (text,) = refused("s3://mine/x", env=env, secret="store")
        assert text.startswith("spec.env or its Secret: got a variable that sets ")


def test_by_default_no_job_brings_credentials() -> None:
    closed = replace(SETTINGS, user_credentials={})
    assert refused(None, settings=closed) == []
    (text,) = refused("s3://mine/x", env={**KEYS, **ENDPOINT}, settings=closed)
    assert text.startswith("spec.checkpoint.path: got s3://mine/x") and "secretName" not in text
    (text,) = refused("s3://bucket-a/x", secret="store", settings=closed)
    assert text.startswith("spec.checkpoint.secretName: got store; expected nothing")
    assert len(refused("s3://bucket-a/x", env=KEYS, settings=closed)) == 2
    everywhere = replace(SETTINGS, user_credentials={"*": ["*"]})
    assert refused("s3://mine/x", env={**KEYS, "AWS_ENDPOINT_URL": "http://x"},
                   settings=everywhere) == []  # fmt: skip


def test_a_started_job_keeps_the_path_that_an_earlier_root_gave_it() -> None:
    assert refused(None, known="s3://old-root/team-a/llm") == []
    assert refused(None, known="/old/team-a/llm") == []
    assert refused(None, known="/checkpoints/team-b/evil/team-a/llm") != []
    (text,) = refused(None, known="s3://elsewhere/x")
    assert text.startswith("spec.checkpoint.path: got s3://elsewhere/x")


@pytest.mark.parametrize(
    ("path", "known", "above"),
    [("/checkpoints/team-a/llm", "", "/checkpoints"), ("/data/x/y", "", "/data"),
     (None, "/old/team-a/llm", "/old"), ("s3://bucket-a/x", "", "")],
)  # fmt: skip
def test_links_are_followed_only_above_the_directories_of_the_operator(
    path: str | None, known: str, above: str
) -> None:
    found = team_job({"path": path} if path else {})
    assert directory_above(found, SETTINGS, path or known) == above


# -- the Secret ------------------------------------------------------------------------------------
OWNER = Owner("team-a", "llm", "uid")


async def read_secret(data: dict[str, str] | None) -> dict[str, str]:
    api = FakeApi()
    if data is not None:
        encoded = {name: base64.b64encode(value.encode()).decode() for name, value in data.items()}
        api.objects[SECRETS.path("team-a", "store")] = {"data": encoded}
    place = {"path": "s3://mine/x", "secretName": "store"}
    found = job_from_mapping(job(script(checkpoint=place, env={"AWS_DEFAULT_REGION": "r"}), "llm"))
    async with cluster_of(api) as cluster:
        return dict((await with_secret(found, OWNER, cluster)).spec.env)


def test_the_operator_uses_the_secret_of_the_job() -> None:
    env = asyncio.run(read_secret({**KEYS, **ENDPOINT}))
    assert env == {**KEYS, **ENDPOINT, "AWS_DEFAULT_REGION": "r"}


@pytest.mark.parametrize(
    ("data", "text"),
    [(None, "got store, which does not exist; expected a Secret of namespace team-a"),
     ({"AWS_ACCESS_KEY_ID": "k"}, "got store without AWS_SECRET_ACCESS_KEY")],
    ids=["missing", "incomplete"],
)  # fmt: skip
def test_a_secret_without_credentials_is_refused_by_name(
    data: dict[str, str] | None, text: str
) -> None:
    """Otherwise the driver would look for others in the environment of the operator."""
    with pytest.raises(UserError, match=f"spec.checkpoint.secretName: {text}"):
        asyncio.run(read_secret(data))

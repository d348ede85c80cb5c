"""The credentials of a job reach its storage driver without the environment of this process."""

from __future__ import annotations

import json
import os
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.errors import HoldfastError, SpecError
from holdfast.orchestrator.protocol.facts import ShardFile
from holdfast.orchestrator.protocol.manifest import shard_file_name
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.runtime.checkpoint_store.options import (
    MOST_ATTEMPTS,
    MOST_WAIT_S,
    access,
    answer_of,
    own_options,
)
from holdfast.orchestrator.runtime.checkpoint_store.store import storage_of
from tests.e2e.storage.server import BUCKET, KEY, S3, SECRET

from ..harness import make_job

S3_ENV = {
    "AWS_ENDPOINT_URL": "http://store",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "moon-1",
    "AWS_MAX_ATTEMPTS": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def s3() -> Iterator[S3]:
    server = S3()
    yield server
    server.kill()


def test_aws_variables_become_options_of_the_driver() -> None:
    options, left = access("s3://bucket/x", S3_ENV)
    assert left == ()
    assert options == {
        "endpoint_url": "http://store",
        "key": "key",
        "secret": "secret",
        "client_kwargs": {"region_name": "moon-1"},
        "config_kwargs": {"retries": {"total_max_attempts": 1}},
    }
    nearer = {**S3_ENV, "AWS_ENDPOINT_URL_S3": "http://s3", "FSSPEC_S3_SECRET": "better"}
    options, _ = access("s3a://bucket/x", nearer)
    assert options["endpoint_url"] == "http://s3" and options["secret"] == "better"


def test_a_directory_needs_no_options_and_other_stores_get_those_of_fsspec() -> None:
    assert access("/checkpoints/x", S3_ENV) == ({}, ())
    assert access("gs://bucket/x", {"FSSPEC_GS_TOKEN": "anon", **S3_ENV}) == ({"token": "anon"}, ())
    assert access("gcs://b/x", {"FSSPEC_GS_TOKEN": "anon"}).options == {"token": "anon"}


def test_the_local_controller_applies_spec_env_where_options_are_not_enough() -> None:
    job = make_job(env=S3_ENV)
    assert own_options(job, "/somewhere") == {}
    assert own_options(job, "s3://bucket/x") is not None
    assert own_options(job, "gs://bucket/x") is None
    profile = make_job(env={**S3_ENV, "AWS_PROFILE": "me"})
    assert own_options(profile, "s3://bucket/x") is None


@pytest.mark.parametrize(
    ("path", "env", "text"),
    [
        ("s3://b/x", {"AWS_PROFILE": "me"}, r"spec\.env\.AWS_PROFILE: got .*AWS_ACCESS_KEY_ID"),
        ("s3://b/x", {"AWS_MAX_ATTEMPTS": "many"}, "AWS_MAX_ATTEMPTS: got many; expected a number"),
        (
            "gs://b/x",
            {"GOOGLE_APPLICATION_CREDENTIALS": "/key.json"},
            r"spec\.env\.GOOGLE_APPLICATION_CREDENTIALS: .*use FSSPEC_GS_\*",
        ),
    ],
)
def test_a_setting_that_cannot_be_applied_to_one_job_is_refused_with_the_fix(
    path: str, env: dict[str, str], text: str
) -> None:
    with pytest.raises(SpecError, match=text):
        storage_of(make_job(env=env), path, "space/x")


@pytest.mark.parametrize("asked", ["1000000", "0", "-1"])
def test_retries_of_a_job_are_bounded_in_a_process_of_many_jobs(asked: str) -> None:
    kwargs = {"read_timeout": None, "connect_timeout": 1e9, "retries": {"max_attempts": 1e9}}
    longer = {"FSSPEC_S3": json.dumps({"config_kwargs": kwargs})}
    for env in ({"AWS_MAX_ATTEMPTS": asked}, longer):
        fs = storage_of(make_job(env=env), "s3://bucket/x", "space/x").fs
        config = {"read_timeout": 1, "connect_timeout": 1, **fs.config_kwargs}
        assert max(config["read_timeout"], config["connect_timeout"]) <= MOST_WAIT_S
        assert set(config["retries"].values()) == {MOST_ATTEMPTS}
    less = storage_of(make_job(env=S3_ENV), "s3://bucket/x", "space/x").fs
    assert less.config_kwargs["retries"] == {"total_max_attempts": 1}


def test_two_jobs_in_one_process_use_their_own_credentials(s3: S3, tmp_path: Path) -> None:
    """The S3 server is real; the environment of this process has none of its settings."""
    before = dict(os.environ)
    first, second = (
        storage_of(make_job(env=env), f"s3://{BUCKET}/{name}", f"space/{name}")
        for name, env in (
            ("one", s3.environment),
            ("two", {**s3.environment, "AWS_ACCESS_KEY_ID": "AKIAOTHEROTHEROTHER1"}),
        )
    )
    assert (first.fs.key, second.fs.key) == (KEY, "AKIAOTHEROTHEROTHER1")
    assert first.fs.secret == SECRET
    first.prepare()
    second.prepare()
    commit(first)
    assert [one.job for one in first.manifests()] == ["space/one"] and second.manifests() == []
    assert dict(os.environ) == before


SECRET_TEXT = "INTERNAL-SECRET"
XML = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"
ANSWERS = {
    "message": ("404 Not Found", XML.format("NoSuchBucket", SECRET_TEXT), "NoSuchBucket"),
    "code": ("403 Forbidden", XML.format(SECRET_TEXT, SECRET_TEXT), "HTTP status 403"),
    "no-xml": ("400 Bad Request", f"password={SECRET_TEXT}", "HTTP status 400"),
    "success": ("200 OK", f"password={SECRET_TEXT}", ""),
    "reason": (f"401 {SECRET_TEXT}", "", "HTTP status 401"),
    "no-http": ("", SECRET_TEXT, "HTTPClientError"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_a_server_answers_is_not_in_a_message(kind: str) -> None:
    status, body, expected = ANSWERS[kind]
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    answer = (head if status else "") + body

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answer.encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {**S3_ENV, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}"}
        storage = storage_of(make_job(env=env), "s3://bucket/x", "space/x")
        storage.fs.retries = 1
        texts = []
        file = ShardFile(5, 1, 0, 1, shard_file_name(0, 1), 5, "00")
        for call in (storage.prepare, storage.manifests, lambda: storage.commit(5, Mesh(), (file,)),
                     lambda: storage.delete(5, 1)):  # fmt: skip
            try:
                call()
            except HoldfastError as error:
                texts.append(str(error))
            except Exception as error:  # as in the executor
                texts.append(answer_of(error) or str(error))
        server.shutdown()
    assert texts and SECRET_TEXT not in str(texts)
    assert expected in str(texts)


def commit(storage: Any) -> None:
    storage.fs.pipe_file(f"{storage.root}/step-00000005.gen-1/{shard_file_name(0, 1)}", b"12345")
    file = ShardFile(5, 1, 0, 1, shard_file_name(0, 1), 5, "00")
    assert storage.commit(5, Mesh(), (file,)) == 5

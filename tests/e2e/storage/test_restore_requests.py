"""A restore of 3,000 tensors from a real S3 server that takes 50 ms for each request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import xxhash

from holdfast.orchestrator.protocol.facts import ShardFile
from holdfast.workers.checkpoint.layout import parse_header
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.shard_sources import CheckpointFiles
from holdfast.workers.checkpoint.state import TrainingState
from tests.unit.workers.checkpoint.fake_ranks import staged_alone

from .server import BUCKET, S3

pytestmark = pytest.mark.e2e

NUM_PARAMETERS = 750
VALUES = 8_000


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    server = S3(latency_s=0.05)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.kill()


def model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    made = torch.nn.ParameterList(torch.randn(VALUES) for _ in range(NUM_PARAMETERS))
    return made, torch.optim.AdamW(made.parameters(), lr=0.01)


def test_a_shard_of_3000_tensors_takes_less_than_100_requests(s3: S3) -> None:
    made, optimizer = model(seed=1)
    for parameter in made.parameters():
        parameter.grad = torch.randn(VALUES)
    optimizer.step()
    content = staged_alone(made, optimizer)
    assert len(parse_header(content, "file").entries) == 4 * NUM_PARAMETERS == 3_000
    s3.files().pipe_file(f"{BUCKET}/job/step/shard", content)

    other, its_optimizer = model(seed=2)
    checksum = xxhash.xxh3_128_hexdigest(content)
    file = ShardFile(0, 1, 0, 1, "shard", len(content), checksum)
    store, ticks, before = CheckpointFiles(f"s3://{BUCKET}/job"), [], s3.num_requests()
    source = store.open("step", file)
    state = TrainingState(other, its_optimizer, None)
    values = restore(
        state, lambda _: source, shard=0, num_shards=1, num_stored=1, step=0,
        tick=lambda: ticks.append(s3.num_requests()),
    )  # fmt: skip
    state.import_extra(values)
    taken = s3.num_requests() - before
    print(f"{len(content) / 2**20:.0f} MiB in {taken} requests, {len(ticks)} ticks")
    assert taken < 100
    assert len(ticks) > 5 and ticks[0] < ticks[-1], "progress is reported while it reads"
    assert staged_alone(other, its_optimizer) == content

"""A plain DataLoader in `session.data`, and state of each rank: a worker is killed, the job shrinks
and grows, and the ledger of the script has each sample once an epoch."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path

import psutil
import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

SIZE, EPOCHS = 150, 2

SCRIPT = """
import json, os, random, time
import torch
from holdfast import session

s = session.init()
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
if s.world_size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
data = torch.arange({size}).float().unsqueeze(1)
loader = torch.utils.data.DataLoader(
    data, batch_size=1, shuffle=True, num_workers=1, persistent_workers=True
)
loader = s.data(loader, seed=5)
draws = random.Random(s.rank)
own = session.PerRank(draws, on_resize="restart")
step = s.restore(model, optimizer, per_rank={{"draws": own}})
out = open(os.path.join({ledger!r}, f"{{s.generation}}-{{s.rank}}"), "a")
for epoch in range(loader.epoch, {epochs}):
    for batch in loader:
        loss = (model(batch) - batch).square().mean() * 1e-6
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = [[epoch, sample] for sample in batch.flatten().int().tolist()]
        out.write(json.dumps([step, rows, loader.weights]) + "\\n")
        out.flush()
        time.sleep(0.02 if s.world_size > 1 else 0.2)  # alone until the other node is back
        s.step(step, loss=loss.detach())
        step += 1
s.finish()
session.leave()
"""


def ledger(place: Path) -> dict[int, list[tuple[int, int]]]:
    """Step -> (epoch, id) of all ranks, of the newest generation that trained it."""
    newest: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    files = sorted(place.iterdir(), key=lambda path: [int(n) for n in path.name.split("-")])
    for file in files:
        generation = int(file.name.split("-")[0])
        for line in file.read_text().splitlines():
            step, rows, weights = json.loads(line)
            if step not in newest or newest[step][0] < generation:
                newest[step] = (generation, [])
            pairs = zip(rows, weights, strict=True)
            newest[step][1].extend((epoch, sample) for (epoch, sample), w in pairs if w)
    return {step: rows for step, (_, rows) in newest.items()}


def test_each_sample_is_trained_once_an_epoch_through_a_kill_and_two_resizes(
    tmp_path: Path,
) -> None:
    place = tmp_path / "ledger"
    place.mkdir()
    script = tmp_path / "train.py"
    values = {"size": SIZE, "epochs": EPOCHS, "ledger": str(place)}
    script.write_text(textwrap.dedent(SCRIPT).format(**values))
    document = spec(
        "own-data", 0, entrypoint={"script": str(script)}, workersPerNode=1,
        parallelism={"shard": 1},
    )  # fmt: skip
    job = Job(tmp_path, document)
    job.run()
    try:
        job.until(lambda view: view.step >= 10)
        killed = job.worker_pids()[1]
        (reader,) = psutil.Process(killed).children()
        job.kill(killed)
        seen = job.running(incidents=1)
        assert not reader.is_running(), "a persistent process of the loader ends with its rank"
        assert "SIGKILL" in seen.incidents[0].title
        view = job.until(lambda view: view.step >= seen.step + 10)
        assert job.request("chaos", kind="kill-node", node=view.nodes[-1].name, hold_s=2.0).ok
        job.until(lambda v: v.state == "running" and v.world_size == 1)
        job.until(lambda v: v.state == "running" and v.world_size == 2)
        assert job.command.wait(60) == 0, job.output()[-3000:]
    finally:
        job.end()
    rows = [row for rows in ledger(place).values() for row in rows]
    assert Counter(rows) == {(e, i): 1 for e in range(EPOCHS) for i in range(SIZE)}
    logs = job.directory.path.glob("logs/gen-*/rank-00000.log")
    said = "2 ranks wrote the state of 'draws', and 1 run now: it begins as the script made it"
    assert said in "".join(path.read_text() for path in logs)

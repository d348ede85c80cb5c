"""Calls that only some ranks make: what is reported, with its line, and what is not."""

from __future__ import annotations

import pytest

from .conftest import Lint, places

HEAD = "import torch, torch.distributed as dist\nrank = dist.get_rank()\nt = torch.ones(1)\n"
FSDP1 = HEAD + "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
FSDP2 = HEAD + "from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(make())\n"

FOUND = [
    pytest.param(HEAD + "if rank == 0:\n    dist.all_reduce(t)\n", ("HANG101", 5), id="branch"),
    pytest.param(HEAD + "if not rank:\n    dist.barrier()\n", ("HANG101", 5), id="not rank"),
    pytest.param(HEAD + "x = dist.broadcast(t, 0) if rank else None\n", ("HANG101", 4), id="ifexp"),
    pytest.param(HEAD + "rank == 0 and dist.barrier()\n", ("HANG101", 4), id="and"),
    pytest.param("import os\nfrom torch.distributed import barrier as wait\n"
        "main = int(os.environ['RANK']) == 0\nif main and True:\n    wait()\n", ("HANG101", 5),
        id="aliases and a variable made from RANK"),
    pytest.param(HEAD + "def main():\n    if rank != 0:\n        return\n    dist.barrier()\n",
        ("HANG102", 7), id="return"),
    pytest.param(HEAD + "for i in range(9):\n    if rank == 1 and i == 3:\n        continue\n"
        "    dist.all_reduce(t)\n", ("HANG102", 7), id="continue"),
    pytest.param(HEAD + "def main(s):\n    with s:\n        if rank:\n            return\n"
        "    dist.barrier()\n", ("HANG102", 8), id="return inside a with"),
    pytest.param(
        HEAD + "match rank:\n    case 0:\n        dist.barrier()\n", ("HANG101", 6), id="match"
    ),
    pytest.param(
        HEAD + "if rank == 0:\n    g = dist.new_group([0])\n", ("HANG101", 5), id="new_group"
    ),
    pytest.param(HEAD + "class A:\n    def log(self):\n        dist.all_reduce(t)\n"
        "    def run(self):\n        if rank == 0:\n            self.log()\n", ("HANG101", 9),
        id="through a method"),
    pytest.param(HEAD + "def log():\n    dist.all_reduce(t)\ndef outer():\n    log()\n"
        "if rank == 0:\n    outer()\n", ("HANG101", 9), id="through two functions"),
    pytest.param(HEAD + "class Logger:\n    def log(self):\n        dist.all_reduce(t)\n"
        "logger = Logger()\nif rank == 0:\n    logger.log()\n", ("HANG101", 9),
        id="through an object"),
    pytest.param("from accelerate import Accelerator\na = Accelerator()\nif a.is_main_process:\n"
        "    a.wait_for_everyone()\n", ("HANG101", 4), id="accelerate"),
    pytest.param(
        "import deepspeed, torch.distributed as dist\nengine, *_ = deepspeed.initialize()\n"
        "if dist.get_rank() == 0:\n    engine.save_checkpoint('x')\n", ("HANG101", 4),
        id="deepspeed"),
    pytest.param(
        "from holdfast import session\ns = session.init()\nif s.rank == 0:\n    s.step(1)\n",
        ("HANG101", 4), id="the session"),
    pytest.param(
        FSDP2 + "if rank == 0:\n    w = model.weight.full_tensor()\n", ("HANG103", 7), id="full"
    ),
    pytest.param(
        FSDP2 + "from torch.distributed.checkpoint.state_dict import get_model_state_dict as g\n"
        "if rank == 0:\n    s = g(model)\n", ("HANG103", 8), id="get_model_state_dict"),
    pytest.param(FSDP2 + "if rank == 0:\n    model(t)\n", ("HANG104", 7), id="forward"),
    pytest.param(FSDP2 + "if rank == 0:\n    torch.save(model.state_dict(), 'a')\n", ("FSDP203", 7),
        id="the state of one shard"),
    pytest.param(
        FSDP1 + "m = FSDP(make(), auto_wrap_policy=p)\nif rank == 0:\n    m.state_dict()\n",
        ("FSDP203", 7), id="the state of FSDP1"),
    pytest.param(
        FSDP1 + "def wrap(m):\n    return FSDP(m, auto_wrap_policy=p)\nnet = wrap(make())\n"
        "def save(m):\n    return m.state_dict()\nif rank == 0:\n    save(net)\n", ("FSDP203", 11),
        id="the state of FSDP1 through functions"),
    pytest.param(HEAD + "try:\n    pass\nexcept Exception:\n    dist.barrier()\n", ("HANG106", 7),
        id="except"),
    pytest.param(HEAD + "data = read()[rank::8]\nfor batch in data:\n    dist.all_reduce(t)\n",
        ("HANG107", 6), id="uneven batches"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "place"), FOUND)
def test_a_call_of_some_ranks_is_found_at_its_line(
    text: str, place: tuple[str, int], lint: Lint
) -> None:
    found = [p for p in places(lint(text)) if p[0].startswith(("HANG", "FSDP203"))]
    assert found == [place]


QUIET = {
    "all ranks": "dist.all_reduce(t)\nif rank == 0:\n    print(t)\n",
    "one rank goes first": "if rank != 0:\n    dist.barrier()\nwork()\nif rank == 0:\n"
    "    dist.barrier()\n",
    "both branches": "if rank == 0:\n    dist.scatter(t, [t])\nelse:\n    dist.scatter(t)\n",
    "helpers that meet": "def a():\n    dist.barrier()\ndef b():\n    dist.barrier()\n"
    "if rank == 0:\n    a()\nelse:\n    b()\n",
    "a group": "g = dist.new_group([0])\nif rank == 0:\n    dist.all_reduce(t, group=g)\n",
    "a group by position": "if rank in (0, 1):\n    dist.all_reduce(t, op, g)\n",
    "not a member": "def f():\n    if dist.get_rank(g) == -1:\n        return\n"
    "    dist.barrier()\n",
    "a rank beyond the world": "def f(rank, world_size):\n    if rank >= world_size:\n"
    "        return\n    dist.barrier()\n",
    "no rank at all": "def f(rank=None):\n    if rank is None:\n        return\n"
    "    dist.barrier()\n",
    "point to point": "if rank == 0:\n    dist.send(t, 1)\n",
    "the rank of a matrix": "def f(m):\n    rank = m.dim()\n    if rank == 2:\n"
    "        dist.all_reduce(t)\n",
    "DDP's state": "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(make())\n"
    "if rank == 0:\n    torch.save(m.state_dict(), 'a')\n    m.module(t)\n",
    "only defined": "if rank == 0:\n    def later():\n        dist.barrier()\n",
    "raise": "if rank == 5:\n    raise ValueError\ndist.barrier()\n",
    "a tensor method": "x = torch.gather(t, 0, t) if rank == 0 else t\n",
    "decided by another part": "def f(ordered):\n    if not ordered and rank == 0:\n        pass\n"
    "    elif ordered:\n        dist.barrier()\n",
    "a loss of a local model": "local = make()\nif rank == 0:\n    out = local(t)\n"
    "    out.sum().backward()\n",
    "an even sampler": "loader = DataLoader(d, sampler=DistributedSampler(d, rank=rank))\n"
    "for b in loader:\n    dist.all_reduce(t)\n",
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET.keys())
def test_a_call_that_ranks_make_together_is_not_reported(text: str, lint: Lint) -> None:
    assert places(lint(HEAD + text)) == []


def test_a_collective_in_an_imported_module_is_found(lint: Lint) -> None:
    helpers = "import torch.distributed as dist\n\ndef total(x):\n    dist.all_reduce(x)\n"
    text = HEAD + "from helpers import total\nif rank == 0:\n    total(t)\n"
    found = lint(text, helpers=helpers)
    assert places(found) == [("HANG101", 6)]
    assert "total(), which calls dist.all_reduce() in line 4, under rank == 0" in found[0].what


def test_a_rank_dependent_branch_of_forward_is_a_warning(lint: Lint) -> None:
    text = HEAD + (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        if rank == 0:\n"
        "            return self.a(x)\n        return self.b(x)\nnet = DDP(Net())\n"
    )
    assert ("HANG105", 8) in places(lint(text))

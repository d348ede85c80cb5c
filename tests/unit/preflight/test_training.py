"""Formats, learning rates, data, files that ranks write, variables and devices."""

from __future__ import annotations

import pytest

from .conftest import Lint, places

HEAD = "import os, torch, torch.distributed as dist\nrank = dist.get_rank()\n"
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(x)\n"
FSDP = "from torch.distributed.fsdp import fully_shard\nfor b in m.l:\n    fully_shard(b)\n" \
       "fully_shard(m)\n"  # fmt: skip
LLM = "from transformers import AutoModelForCausalLM as A\n"
LOAD = "n = AutoModelForCausalLM.from_pretrained('x', device_map='meta')\n"

FOUND = {
    "FSDP214": FSDP + "torch.save(m.state_dict(), 'a.pt')\n",
    "FSDP215": FSDP + "n = AutoModelForCausalLM.from_pretrained('x')\n",
    "FSDP213": FSDP + "if rank == 0:\n    m.load_state_dict(s)\n",
    "DDP301": "m = torch.nn.DataParallel(x)\n",
    "DDP302": DDP + "m._set_static_graph()\n",
    "DDP303": DDP + "m = DDP(x, static_graph=True)\nclass N:\n    def forward(self, x):\n"
    "        if x.sum() > 0:\n            return 1\n",
    "DDP305": DDP + "state = {'m': m.state_dict()}\ntorch.save(state, f'{step}.pt')\n",
    "NUM401": "with torch.autocast('cuda', torch.float16):\n    loss = f()\nloss.backward()\n",
    "NUM402": LOAD + "o = torch.optim.AdamW(n.parameters(), lr=3e-4)\n",
    "NUM403": "import peft\nc = peft.LoraConfig()\nLR = 5e-6\no = torch.optim.AdamW(p, LR)\n",
    "DATA404": "from torch.utils.data import DistributedSampler\ns = DistributedSampler(d)\n"
    "for epoch in range(3):\n    f()\n",
    "IMP405": "from torch.utils.checkpoint import checkpoint_wrapper\n",
    "ENV501": "os.environ['NCCL_TIMEOUT'] = '3600'\n",
    "ENV503": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank')\n",
    "ENV504": "d = torch.device('cuda:0')\n",
    "ENV505": "import torch.multiprocessing as mp\nmp.spawn(main, args=(2,), nprocs=2)\n",
    "ENV506": "os.environ['MASTER_PORT'] = '29500'\n",
    "ENV507": "import subprocess as s\ns.Popen(['setsid', 'sh', '-c', 'cp a b'])\n",
}
"""Rule -> a script in which it is the only one."""


@pytest.mark.parametrize(("rule", "text"), FOUND.items(), ids=FOUND.keys())
def test_a_silent_error_of_training_is_found(rule: str, text: str, lint: Lint) -> None:
    assert [found for found, _line in places(lint(HEAD + text))] == [rule]


QUIET = {
    "a file of each rank": FSDP + "torch.save(m.state_dict(), f'{rank}.pt')\n",
    "a file of each rank by a variable": FSDP + "p = os.path.join('a', str(rank))\n"
    "torch.save(m.state_dict(), p)\n",
    "a path of the caller": FSDP + "def save(p):\n    torch.save(m.state_dict(), p)\n",
    "saved by callers of rank 0": DDP + "def save():\n    torch.save(m.state_dict(), 'a')\n"
    "if rank == 0:\n    save()\n",
    "a tokenizer": FSDP + "t = AutoTokenizer.from_pretrained('x')\n",
    "on meta": FSDP + "with torch.device('meta'):\n    n = AutoModel.from_pretrained('x')\n",
    "with a scaler": "s = torch.amp.GradScaler()\nwith torch.autocast('cuda'):\n    loss = f()\n"
    "s.scale(loss).backward()\n",
    "bfloat16": "with torch.autocast('cuda', torch.bfloat16):\n    loss = f()\nloss.backward()\n",
    "from scratch": "o = torch.optim.AdamW(p, lr=3e-4)\n",
    "LoRA at its rate": LOAD + "import peft\nc = peft.LoraConfig()\no = torch.optim.AdamW(p, "
    "lr=2e-4)\n",
    "set_epoch": "from torch.utils.data import DistributedSampler\ns = DistributedSampler(d)\n"
    "for epoch in range(3):\n    s.set_epoch(epoch)\n",
    "a variable that is only read": "x = os.environ.get('NCCL_TIMEOUT')\n",
    "an address if there is none": "if 'MASTER_ADDR' not in os.environ:\n"
    "    os.environ['MASTER_ADDR'] = 'localhost'\nos.environ.setdefault('MASTER_PORT', '1')\n",
    "spawn without a launcher": "import torch.multiprocessing as mp\n"
    "if 'LOCAL_RANK' not in os.environ:\n    mp.spawn(main, nprocs=2)\n",
    "a process that is waited for": "import subprocess\nsubprocess.run(['cp', 'a', 'b'])\n",
    "isinstance": "isinstance(m, torch.nn.DataParallel)\n",
    "a device of its own": "d = torch.device('cuda', rank)\n",
    "tensor.to(0)": "x = x.to(dtype)\n",
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET.keys())
def test_what_is_right_is_not_reported(text: str, lint: Lint) -> None:
    assert places(lint(HEAD + text)) == []


def test_defaults_that_surprise_are_notes(lint: Lint) -> None:
    text = HEAD + DDP + "dist.init_process_group('nccl')\n"
    text += "with torch.autocast('cuda', torch.bfloat16):\n    m(x)\n"
    assert [(f.rule, f.severity) for f in lint(text)] == [("ENV502", "note"), ("DDP304", "note")]


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.Popen('nohup cp a b &', shell=True)",
        "subprocess.Popen(['cp', 'a', 'b'], start_new_session=True)",
        "os.system('cp a b &')",
    ],
)
def test_a_process_in_the_background_is_found(line: str, lint: Lint) -> None:
    assert places(lint(HEAD + "import subprocess\n" + line)) == [("ENV507", 4)]


def test_variables_of_update_and_setdefault_are_found(lint: Lint) -> None:
    text = HEAD + "os.environ.update({'NCCL_TIMEOUT': '1'})\n"
    text += "os.environ.setdefault('NCCL_BLOCKING_WAIT', '1')\n"
    assert places(lint(text)) == [("ENV501", 3), ("ENV501", 4)]

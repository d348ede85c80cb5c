"""Options of FSDP1, formats of reduction, units, the order of optimizer and sharding."""

from __future__ import annotations

import pytest

from .conftest import Lint, places

ONE = "import torch\nfrom torch.distributed.fsdp import *\n"
HEAD = "import torch\nfrom torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy\n"
OLD = (
    "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
    "from torch.distributed.fsdp import MixedPrecision, ShardingStrategy\n"
)
BLOCKS = "for b in model.layers:\n    fully_shard(b)\nfully_shard(model)\n"
OPTIMIZER = "o = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"

FOUND = [
    pytest.param(OLD + "m = FSDP(x, auto_wrap_policy=p)\n", "FSDP201", 4, id="FSDP1"),
    *[
        pytest.param(OLD + f"m = FSDP(x, p, auto_wrap_policy=p, {name}=1)\n", "FSDP202", 4, id=name)
        for name in ("backward_prefetch", "forward_prefetch", "limit_all_gathers",
                     "use_orig_params", "sync_module_states", "device_id")
    ],
    pytest.param(OLD + "p = MixedPrecision(buffer_dtype=torch.bfloat16)\n", "FSDP202", 4, id="buf"),
    pytest.param(HEAD + "fully_shard(m, use_orig_params=True)\n", "FSDP204", 3, id="wrong option"),
    pytest.param(
        OLD + "m = FSDP(x, sharding_strategy=ShardingStrategy.NO_SHARD, auto_wrap_policy=p)\n",
        "FSDP205", 4, id="NO_SHARD",
    ),
    pytest.param(OLD + "with FSDP.state_dict_type(m, t):\n    pass\n", "FSDP205", 4, id="type"),
    pytest.param(HEAD + "p = MixedPrecisionPolicy(torch.bfloat16)\n", "FSDP206", 3, id="no reduce"),
    pytest.param(
        HEAD + "low = torch.bfloat16\np = MixedPrecisionPolicy(low, reduce_dtype=low)\n",
        "FSDP207", 4, id="bf16 reduce",
    ),
    pytest.param(OLD + "p = MixedPrecision(param_dtype=torch.bfloat16)\n", "FSDP207", 4, id="old"),
    pytest.param(HEAD + "fully_shard(model)\n", "FSDP208", 3, id="one unit"),
    pytest.param(OLD + "m = FSDP(x)\n", "FSDP208", 4, id="one unit of FSDP1"),
    pytest.param(HEAD + OPTIMIZER + BLOCKS, "FSDP209", 3, id="optimizer first"),
    pytest.param(
        HEAD + "from transformers import BitsAndBytesConfig\nc = BitsAndBytesConfig("
        "load_in_4bit=True)\n" + BLOCKS, "FSDP210", 4, id="uint8 storage",
    ),
    pytest.param(
        HEAD + "from transformers import BitsAndBytesConfig\nc = BitsAndBytesConfig("
        "load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)\n" + BLOCKS,
        "FSDP211", 4, id="packed in bf16",
    ),
    pytest.param(
        HEAD + "import peft\nm = AutoModel.from_pretrained('x', dtype=torch.bfloat16, "
        "device_map='meta')\nmodel = peft.get_peft_model(m, c)\n" + BLOCKS,
        "FSDP211", 5, id="float32 adapters",
    ),
    pytest.param(
        HEAD + "model.head.weight = model.emb.weight\nfor b in l:\n    fully_shard(b)\n"
        "fully_shard(model.emb)\nfully_shard(model.head)\n", "FSDP212", 3, id="tied and apart",
    ),
    pytest.param(
        OLD + "m.tie_weights()\nf = FSDP(m, auto_wrap_policy=p, sync_module_states=True)\n",
        "FSDP212", 5, id="tied and synchronised",
    ),
    pytest.param(
        "from accelerate import FullyShardedDataParallelPlugin as P\n"
        "p = P(fsdp_version=2, backward_prefetch='x')\n", "FSDP216", 2, id="accelerate",
    ),
    pytest.param(
        OLD + "from peft import get_peft_model\nm = FSDP(x, auto_wrap_policy=p)\n",
        "FSDP217", 5, id="adapters in FSDP1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rule", "line"), FOUND)
def test_a_wrong_or_old_way_to_shard_is_found(text: str, rule: str, line: int, lint: Lint) -> None:
    assert (rule, line) in places(lint(text))


QUIET = {
    "the right way": BLOCKS + OPTIMIZER + "p = MixedPrecisionPolicy(torch.bfloat16, "
    "torch.float32)\n",
    "float32 without reduce_dtype": "p = MixedPrecisionPolicy()\n" + BLOCKS,
    "options from elsewhere": "p = MixedPrecisionPolicy(**options)\n" + BLOCKS,
    "another model in between": OPTIMIZER + "model = make()\n" + BLOCKS,
    "built again after it": OPTIMIZER + BLOCKS + OPTIMIZER,
    "either sharded or not": "if a:\n    o = torch.optim.SGD(model.parameters())\nelse:\n"
    "    fully_shard(model.x)\n    fully_shard(model)\n",
    "a function in a loop": "def apply(m):\n    fully_shard(m)\nfor b in l:\n    apply(b)\n",
    "two units": "fully_shard(model.a)\nfully_shard(model)\n",
    "tied and in one group": "model.head.weight = model.emb.weight\n"
    "fully_shard([model.emb, model.head])\n" + BLOCKS,
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET.keys())
def test_the_right_way_to_shard_is_quiet(text: str, lint: Lint) -> None:
    assert places(lint(HEAD + text)) == []


def test_each_old_option_has_its_answer(lint: Lint) -> None:
    text = OLD + "m = FSDP(x, auto_wrap_policy=p, limit_all_gathers=True)\n"
    found = {f.rule: f for f in lint(text)}
    assert found["FSDP202"].what == "limit_all_gathers of FSDP1"
    assert "FSDP2 needs no limit" in found["FSDP202"].fix


def test_an_optimizer_in_a_branch_that_is_sharded_later_is_found(lint: Lint) -> None:
    text = ONE + "if fused:\n    " + OPTIMIZER + BLOCKS
    assert ("FSDP209", 4) in places(lint(text))

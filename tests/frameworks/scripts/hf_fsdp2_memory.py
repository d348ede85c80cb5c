"""hf_memory.py with FSDP2 of accelerate, which shards on GPUs only: a shim has it take ranks on
CPUs for such."""

from __future__ import annotations

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from hf_trainer import main

from holdfast.integrations import in_memory

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def take_cpus_for_gpus() -> None:
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    main(prepare=in_memory, begin=take_cpus_for_gpus, **FSDP2)

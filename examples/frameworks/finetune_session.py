"""Fine-tuning by a loop of one's own with transformers, PEFT and FSDP2: full, LoRA, or QLoRA.

holdfast run examples/frameworks/finetune_session.py --nodes 2 --workers 2

`-- full` and `-- qlora` (NF4, by torchao) are the other methods. No checkpoint has frozen weights.
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast import session

WORDS, EPOCHS = 64, 8


def main() -> None:
    method = sys.argv[1] if len(sys.argv) > 1 else "lora"
    s = session.init()
    torch.manual_seed(0)  # the same frozen weights in each start
    sizes = {"vocab_size": WORDS, "hidden_size": 256, "num_attention_heads": 4}
    config = LlamaConfig(intermediate_size=512, num_hidden_layers=2, **sizes)
    model: torch.nn.Module = LlamaForCausalLM(config)
    if method != "full":
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    if method == "qlora":
        from torchao.quantization import NF4Tensor

        for own in (one for name, one in model.named_modules() if name.endswith("base_layer")):
            own.weight = torch.nn.Parameter(NF4Tensor.from_tensor(own.weight.data, 64, 256), False)
    if s.world_size > 1:  # NF4: with several workers on a node, or shard: world
        for block in (one for one in model.modules() if type(one).__name__ == "LlamaDecoderLayer"):
            fully_shard(block, mesh=s.fsdp_mesh)
        fully_shard(model, mesh=s.fsdp_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = torch.arange(512).unsqueeze(1)
    texts = (first * 7 + torch.arange(32) * (first % 5 + 1)) % WORDS
    loader = s.data(DataLoader(texts, batch_size=8, shuffle=True), epochs=EPOCHS)
    s.restore(model, optimizer, keep="trainable")
    for step in s.steps():
        with s.attempt():
            tokens = next(loader).to(s.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            s.step(step, loss=loss.detach(), total_steps=EPOCHS * len(loader))
    s.finish()
    session.leave()


if __name__ == "__main__":
    main()

"""The rules of `holdfast spec preflight`: what each looks for, why it matters, and its source.

Severity: an error hangs, crashes or trains something else than was meant; a warning probably does,
or costs much; a note explains a default. Only errors decide the exit code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class LintRule:
    """`finds` is what the rule looks for, `why` what happens otherwise, `fix` what to write instead
    and `source` where the behaviour is documented or was reported."""

    id: str
    severity: Severity
    finds: str
    why: str
    fix: str
    source: str


@dataclass(frozen=True, order=True)
class Finding:
    """One place that a rule found. `line` and `column` count from 1; `what` names the code, `why`
    and `fix` are the rule's unless the place has better ones."""

    file: Path
    line: int
    column: int
    rule: str
    severity: Severity
    what: str
    why: str
    fix: str

    def text(self, shown: str) -> str:
        """`train.py:41: error FSDP203 what: why; fix`, with the file as `shown`."""
        where = f"{shown}:{self.line}"
        return f"{where}: {self.severity} {self.rule} {self.what}: {self.why}; {self.fix}"


_FSDP2_DOCS = "torch documentation of torch.distributed.fsdp.fully_shard"
_ALL_RANKS = "the other ranks never make the call, so this one waits until the group's timeout"
_EVERY_RANK = "call it on every rank, and only write or print the result under rank == 0"
_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE

_TABLE = [
    LintRule("PRE001", _E, "a file that is not valid Python",
         "the worker ends with this error when it starts", "correct the line",
         "Python's parser"),
    LintRule("PRE002", _W, "`# holdfast: ignore[ID]` with an unknown ID",
         "the comment silences nothing", "`holdfast spec preflight --rules` lists the IDs",
         "this table"),
    LintRule("HANG101", _E, "a collective call that only some ranks reach, by a branch",
         _ALL_RANKS, _EVERY_RANK,
         "torch documentation of torch.distributed; reproduced with two gloo processes (D13)"),
    LintRule("HANG102", _E, "a collective call behind a return, continue or break of some ranks",
         _ALL_RANKS, "let every rank reach the call, and skip only the work",
         "reproduced with two gloo processes (D13: a skipped rank)"),
    LintRule("HANG103", _E, "`full_tensor()` or a full state dict of a sharded model on some ranks",
         "it gathers the shards of all ranks, and the other ranks never make the call",
         "call it on every rank, and keep the result under rank == 0",
         "trl#7103; reproduced with two gloo processes (D13)"),
    LintRule("HANG104", _E, "forward or backward of a sharded or replicated model on some ranks",
         "forward gathers parameters and backward reduces gradients with all ranks",
         "run the model on every rank, and only use the result under rank == 0",
         "prime-rl#2515; torch documentation of DistributedDataParallel"),
    LintRule("HANG105", _W, "a rank-dependent branch in forward() that calls other submodules",
         "ranks then reduce different gradients, which hangs or mixes them up",
         "let every rank use the same submodules, or multiply the unused result by 0",
         "torch documentation of DistributedDataParallel; D09, D13"),
    LintRule("HANG106", _W, "a collective call in an except block",
         "an exception on one rank makes only that rank call it",
         "let the exception end the process: Holdfast restarts all ranks together",
         "torch documentation of torch.distributed"),
    LintRule("HANG107", _W, "collectives in a loop over a part of the data that differs by rank",
         "a rank with one batch more calls once more, and waits for the others",
         "give every rank the same number of batches: DistributedSampler, or stop all ranks "
         "together by an all_reduce of a flag; for DDP torch.distributed.algorithms.Join",
         "prime-rl#2515; torch documentation of torch.distributed.algorithms.Join"),
    LintRule("FSDP201", _W, "FullyShardedDataParallel (FSDP1)",
         "torch steers users to FSDP2; this class keeps one flat parameter for each module",
         "call torch.distributed.fsdp.fully_shard on each block, then on the model",
         _FSDP2_DOCS),
    LintRule("FSDP202", _W, "an option that only FSDP1 has",
         "fully_shard has no such option", "see what FSDP2 does instead",
         "the migration section of torch's FSDP2 tutorial; T03 to T10 of the inventory"),
    LintRule("FSDP203", _E, "`state_dict()` of a sharded model under rank == 0",
         "FSDP1 gathers the parameters of all ranks for it, and the other ranks never call it",
         "call it on every rank, and write the result under rank == 0",
         "reproduced with two gloo processes (D13, X21)"),
    LintRule("FSDP204", _E, "an option of FSDP1 passed to fully_shard()",
         "fully_shard raises TypeError", "remove it, see what FSDP2 does instead",
         _FSDP2_DOCS),
    LintRule("FSDP205", _W, "NO_SHARD, or `state_dict_type()` of FSDP1",
         "torch warns that it is deprecated", "see the replacement",
         "warnings of torch.distributed.fsdp (2.11 to 2.15)"),
    LintRule("FSDP206", _W, "MixedPrecisionPolicy without reduce_dtype",
         "the default differs: up to torch 2.14 gradients are reduced in param_dtype, from 2.15 on "
         "in the format that the parameter's gradient has",
         "set reduce_dtype=torch.float32",
         "docstring of MixedPrecisionPolicy in torch 2.15 (X18)"),
    LintRule("FSDP207", _W, "gradients reduced in bfloat16 or float16",
         "sums over many ranks lose small terms, and the loss may spike",
         "set reduce_dtype=torch.float32", "torchtitan allows float32 only (Q03, D06, X18)"),
    LintRule("FSDP208", _W, "one FSDP unit for the whole model",
         "every forward gathers all parameters at once, so memory holds the whole model",
         "call fully_shard on each block first, then on the model", f"{_FSDP2_DOCS} (D04, T12)"),
    LintRule("FSDP209", _E, "an optimizer that is built before the model is sharded",
         "it holds the parameters from before, which are no longer the model's: nothing is trained",
         "build the optimizer after the model is sharded", _FSDP2_DOCS),
    LintRule("FSDP210", _E, "4-bit weights with uint8 storage in a sharded model",
         "FSDP shards only floating point parameters of one dtype: it crashes or corrupts them",
         "set bnb_4bit_quant_storage to the dtype of the other parameters",
         "accelerate#3983 (X31)"),
    LintRule("FSDP211", _W, "parameters of several dtypes in one FSDP group",
         "a group is gathered in one dtype", "give all parameters of a group one dtype",
         "LlamaFactory#10157, bitsandbytes#1945, accelerate#3844 (X31)"),
    LintRule("FSDP212", _W, "tied weights in a sharded model",
         "the two uses may end in different groups, or hang when states are synchronised",
         "tie after sharding in one group: fully_shard([embedding, head])",
         "pytorch#143181 (D12)"),
    LintRule("FSDP213", _W, "weights loaded on some ranks of a sharded model",
         "the step does not hang: ranks continue with different weights, a silently wrong model",
         "load on every rank, or broadcast: set_model_state_dict with "
         "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)",
         "measured with FSDP1 and FSDP2 (D01, X20)"),
    LintRule("FSDP214", _E, "all ranks write the state of a sharded model to one path",
         "each rank overwrites the file with its own shard: the rest of the model is lost",
         "use torch.distributed.checkpoint.save on every rank, or holdfast.session",
         "torch documentation of torch.distributed.checkpoint"),
    LintRule("FSDP215", _W, "`from_pretrained()` of the whole model on every rank",
         "each process of a node holds all weights in main memory: 8 x 140 GB for 70B",
         "build on torch.device('meta') and load into shards, or low_cpu_mem_usage=True",
         "ms-swift#9980 (X29, M28)"),
    LintRule("FSDP216", _W, "an option that accelerate removed with fsdp_version 2",
         "accelerate ignores it with a warning, or rejects it", "remove it",
         "accelerate's guide FSDP1 vs FSDP2 (T02, T04, T08, X19)"),
    LintRule("FSDP217", _W, "FSDP1 and LoRA without use_orig_params=True",
         "a flat parameter mixes frozen and trainable parameters",
         "use fully_shard, or set use_orig_params=True", "docstring of FSDP1 (D02, T07)"),
    LintRule("DDP301", _E, "nn.DataParallel",
         "each worker has its own GPU: workers train separate models that are never synchronised",
         "use DistributedDataParallel, or fully_shard",
         "torch documentation of nn.DataParallel (S01)"),
    LintRule("DDP302", _W, "`_set_static_graph()`", "the method is private and may change",
         "pass static_graph=True to DistributedDataParallel",
         "docstring of DistributedDataParallel (X22)"),
    LintRule("DDP303", _W, "static_graph=True with control flow that depends on data",
         "a step that uses other parameters than the first one hangs or gets wrong gradients",
         "remove static_graph=True, or the branch",
         "docstring of DistributedDataParallel (D09, R26)"),
    LintRule("DDP304", _N, "torch.autocast with DistributedDataParallel",
         "parameters are float32, so their gradients are reduced in float32",
         "for bfloat16 on the network register bf16_compress_hook", "measured (X14)"),
    LintRule("DDP305", _W, "all ranks write the same file",
         "writes overlap, and a reader may see a torn file",
         "write under rank == 0, or use holdfast.session", "torch's DDP tutorial"),
    LintRule("NUM401", _W, "float16 without GradScaler",
         "small gradients become 0 in float16", "use torch.amp.GradScaler, or bfloat16",
         "torch documentation of torch.amp"),
    LintRule("NUM402", _W, "the learning rate of LoRA in full fine-tuning of a pretrained model",
         "rates above 1e-4 destroy what a large pretrained model has learned",
         "use 1e-6 to 2e-5 (5e-6 for 70B)", "T19 of the inventory"),
    LintRule("NUM403", _W, "the learning rate of full fine-tuning with LoRA",
         "adapters start at 0 and hardly move at this rate", "use 1e-4 to 3e-4",
         "T19 of the inventory"),
    LintRule("DATA404", _W, "DistributedSampler that shuffles, without set_epoch()",
         "every epoch has the same order", "call sampler.set_epoch(epoch) in each epoch",
         "torch documentation of DistributedSampler"),
    LintRule("IMP405", _E, "checkpoint_wrapper imported from torch.utils.checkpoint",
         "ImportError: the module has no such name",
         "import it from torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
         "torch's source (X33)"),
    LintRule("RES601", _N, "a flag with which the script resumes",
         "Holdfast restarts the script with the same arguments, so it begins at step 0 again",
         "write it in entrypoint.resumeArgs", "docs/user/script.md"),
    LintRule("ENV501", _W, "an environment variable without the expected effect",
         "nothing reads it", "see the replacement",
         "the table in docs/user/job-spec.md, with its sources (D03, X23)"),
    LintRule("ENV502", _N, "init_process_group without timeout",
         "a hang lasts 10 minutes with NCCL and 30 with gloo until torch ends it",
         "pass timeout=; under Holdfast spec.recovery.hangTimeoutSeconds acts earlier",
         "torch/distributed/constants.py, pytorch#110901 (X23)"),
    LintRule("ENV503", _W, "torch.distributed.launch, or its argument --local_rank",
         "the launcher is deprecated; Holdfast, like torchrun, passes LOCAL_RANK",
         "read os.environ['LOCAL_RANK']", "torch documentation of torchrun"),
    LintRule("ENV504", _W, "the device cuda:0 in a script of several workers",
         "every worker of a node uses the first GPU",
         "use torch.device('cuda', int(os.environ['LOCAL_RANK']))", "torch's DDP tutorial (S48)"),
    LintRule("ENV505", _W, "torch.multiprocessing.spawn in a script that each worker runs",
         "each worker starts ranks of its own: with several workers a node their ports collide",
         "call the function once, with the rank of os.environ['RANK'], and set spec.workersPerNode",
         "torch's tutorial on DDP with torchrun; pytorch#85604, pytorch#126510"),
    LintRule("ENV506", _W, "MASTER_ADDR or MASTER_PORT written by the script",
         "ranks on other machines wait at the wrong address, and a port in use fails a restart",
         "remove it: Holdfast sets both in each launch; or use os.environ.setdefault()",
         "docs/user/job-spec.md"),
    LintRule("ENV507", _W, "a process in the background (setsid, nohup, start_new_session)",
         "Holdfast ends it with the worker that started it, with what it has not done",
         "wait for it before the script ends, or do its work in a thread that is not a daemon",
         "docs/user/script.md; pytorch#92151"),
]  # fmt: skip

RULES: dict[str, LintRule] = {rule.id: rule for rule in _TABLE}

_IGNORE = re.compile(r"#\s*holdfast:\s*ignore\[([^\]]*)\]")


def ignored_ids(comment: str) -> set[str]:
    """The IDs that a comment silences: `# holdfast: ignore[FSDP203, ENV502]`."""
    match = _IGNORE.search(comment)
    return {word.strip() for word in match[1].split(",")} - {""} if match else set()

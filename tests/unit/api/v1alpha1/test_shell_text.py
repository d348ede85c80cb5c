"""Which lines of a shell script start ranks, and which only look like it."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.api.v1alpha1.launcher_words import in_shell
from holdfast.orchestrator.api.v1alpha1.shell_text import commands

STARTS = [
    "torchrun a.py",
    "uv run torchrun a.py",
    "nohup torchrun a.py &",
    "time torchrun a.py",
    "time -p torchrun a.py",
    "cd src && torchrun a.py",
    "set -e; torchrun a.py",
    "source x; torchrun a.py",
    "false || torchrun a.py",
    "conda run -n x torchrun a.py",
    "python3.11 -m torch.distributed.run a.py",
    "python -u -m torch.distributed.launch a.py",
    "$PYTHON -m torch.distributed.run a.py",
    '"${PYTHON:-python}" -u -m torch.distributed.run a.py',
    "$(which python) -m torch.distributed.run a.py",
    "accelerate-launch a.py",
    "accelerate launch a.py",
    "python -m deepspeed.launcher.runner a.py",
    "if [ -n \"$X\" ]; then torchrun a.py; fi",
    "for seed in 1 2; do torchrun a.py; done",
    "for seed in 1 2\ndo\n  torchrun a.py --seed $seed\ndone",
    "train() { torchrun a.py; }\ntrain",
    'OPT="a b" torchrun a.py',
    "export A='x\ny'\ndeepspeed a.py",
    "trl sft",
    "exec mpirun.openmpi -np 2 python a.py",
    "A=1 exec /venv/bin/torchrun a.py",
    "OUT=$(torchrun a.py)",
    'export CMD="torchrun --nnodes 2"; $CMD a.py',
    "coproc torchrun a.py",
    'OUT="x $(torchrun a.py)"',
    "echo `torchrun a.py`",
    "eval \"torchrun a.py\"",
    "python a.py | tee log; deepspeed a.py 2>&1 | tee log",
    "cat <<EOF > c.yaml\nx: 1\nEOF\ntorchrun a.py",
    "(( a << b ))\ntorchrun a.py",
    "echo ${#x} # it's\ntorchrun a.py",
    "case $1 in\n  a) torchrun a.py ;;\nesac",
    "env A=1 torchrun \\\n  --nproc_per_node 2 \\\n  a.py",
]  # fmt: skip

DOES_NOT = [
    "python a.py  # torchrun a.py",
    "# torchrun a.py\npython a.py",
    "echo \"write: torchrun a.py\"",
    "echo 'a; torchrun a.py'",
    "echo torchrun a.py",
    "cat <<'EOF'\ntorchrun a.py\nEOF\npython a.py",
    "cat <<-EOF\n\ttorchrun a.py\n\tEOF\npython a.py",
    "pip install deepspeed && python a.py --deepspeed ds.json",
    "uv pip install deepspeed; uv add trl; conda install -n x deepspeed",
    "uv run --with deepspeed a.py",
    "if command -v torchrun > /dev/null; then echo yes; fi",
    "which torchrun",
    "python a.py --launcher deepspeed",
    "nohup python a.py --strategy deepspeed &",
    "bash other.sh deepspeed",
    "python a.py > torchrun",
    "NAME=torchrun python a.py",
    "export NAME=torchrun KIND='a torchrun'; python a.py",
    "mkdir -p ds && cd ds && python ../a.py",
]  # fmt: skip


@pytest.mark.parametrize("text", STARTS)
def test_a_line_that_starts_ranks_is_found(text: str) -> None:
    assert in_shell(f"#!/bin/bash\nset -e\n{text}\n") is not None


@pytest.mark.parametrize("text", DOES_NOT)
def test_other_lines_are_not_taken_for_one(text: str) -> None:
    assert in_shell(f"#!/bin/bash\nset -e\n{text}\n") is None


def test_words_are_without_quotes_and_redirections() -> None:
    text = 'A=1 python \'a b\'.py "c"\\ d > log 2>&1 && x $(y "$Z") | tail'
    assert list(commands(text)) == [
        ["A=1", "python", "a b.py", "c d"],
        ["x", "$"],
        ["y", "$Z"],
        ["tail"],
    ]


def test_any_text_comes_to_an_end() -> None:
    for text in ("'", '"', "`", "$(", "<<", "<<X", "\\", "${", "$((", "#", ">", "&|;;", "a'b"):
        assert isinstance(list(commands(text)), list)

"""Activity of a rank without progress by its stack: a collective, a wait, a read, its own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.workers.agent.pool.stack_activity import activity, waits_for_peers


def stack(*frames: tuple[str, str]) -> str:
    """(file, function), innermost first."""
    lines = [f'  File "{file}", line 2 in {name}' for file, name in frames]
    return "\n".join(["Current thread 0x00007f (most recent call first):", *lines])


TRAIN = ("/job/train.py", "main")
STACKS = {
    "peers": [
        stack(("/x/torch/distributed/distributed_c10d.py", "all_reduce"), TRAIN),
        stack(("/x/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "wait"), TRAIN),
    ],
    "device": [
        stack(("/x/torch/cuda/__init__.py", "synchronize"), TRAIN),
        stack(("/x/workers/session/core.py", "_report"), ("/x/workers/session/core.py", "step")),
    ],
    "staging": [
        stack(
            ("/usr/lib/python3.11/threading.py", "wait"),
            ("/x/workers/checkpoint/stage.py", "finish"),
            ("/x/workers/session/core.py", "save"),
        ),
        stack(("/x/workers/session/agent_channel.py", "take_buffer")),
    ],
    "reads": [
        stack(("/usr/lib/python3.11/queue.py", "get"), ("/x/torch/utils/data/dataloader.py", "n")),
        stack(("/usr/lib/python3.11/ssl.py", "read"), ("/job/data.py", "fetch")),
    ],
    "compiles": [stack(("/usr/lib/x/re.py", "f"), ("/x/torch/_inductor/graph.py", "compile"))],
    "engine": [stack(("/x/torch/autograd/graph.py", "_engine_run_backward"), TRAIN)],
    "nothing": [
        stack(TRAIN),
        stack(("/x/torch/distributed/tensor/_dispatch.py", "dispatch"), TRAIN),
    ],
    "": ["", "no stack could be taken; the process is in state D"],
}


@pytest.mark.parametrize("kind", list(STACKS))
def test_the_innermost_frames_show_what_the_main_thread_is_in(kind: str) -> None:
    for text in STACKS[kind]:
        assert activity(text, line_of=lambda file, line: "y = f(x)") == kind
        assert waits_for_peers(activity(text)) == (kind in ("peers", "device"))


@pytest.mark.parametrize("line", ["total += loss.item()", "print(float(loss))", "x.tolist()"])
def test_a_wait_for_the_device_is_recognised_by_its_source_line(line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{line}\n")
    text = stack((str(script), "train_one"), (str(script), "<module>"))
    assert activity(text) == "device"
    script.with_name("other.py").write_text("import torch\nx = make(loss)\n")
    assert activity(stack((str(script.with_name("other.py")), "train_one"))) == "nothing"

"""Completeness of frameworks' checkpoints, by the files that the frameworks write.

Invariant: what is not recognised is complete. Every function here only reads.

Facts, from the packages: transformers 5.23 writes `trainer_state.json` last of rank 0
(`Trainer._save_checkpoint`) and has `checkpoint-is-incomplete.txt` in a checkpoint on SIGTERM;
accelerate 1.15 writes `random_states_0.pkl` after model and optimizer, and objects registered for
checkpointing after that; torch's DCP renames `.metadata` into place when all ranks have written;
`torch.save` writes a zip file, whose directory is at its end; DeepSpeed 0.19 writes the tag into
`latest` last; a safetensors file begins with the offsets of what it holds.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["transformers", "accelerate", "dcp", ""]
"""Framework that wrote a directory; empty: unknown."""

SENTINEL = "checkpoint-is-incomplete.txt"
MAX_HEADER_BYTES = 16 * 2**20
"""Largest header of a safetensors file that is read; with a larger one it counts as complete."""
SAVED_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
"""Files whose end can be looked for."""
_WEIGHTS = re.compile(
    r"(pytorch_model|model|adapter_model|diffusion_pytorch_model)[^/]*\.(bin|safetensors)"
    r"|pytorch_model_fsdp.*|pytorch_model|global_step.*|.*\.(safetensors|distcp)"
)
_HOLDS_OTHERS = re.compile(r"checkpoint[-_]\d+|checkpoints")
"""Names in the folder of a run, not in a checkpoint."""
_OF_RANK = re.compile(r"(?:^rng_state|^random_states|zero_pp_rank|expp_rank|^rank|^_)_(\d+)")
"""Files of which each rank writes one."""
_STEP = re.compile(r"(?:checkpoint|ckpt|step|iter)[-_=]?(\d+)")
FEW = 8
"""Files of other nodes' ranks that a node opens."""
_OPTIMIZER_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True)
class Share:
    """Share of the single ranks' files that a node opens: thousands take seconds. All nodes
    together open all of them, also those of a checkpoint that more ranks wrote."""

    first_rank: int = 0
    ranks: int = 1
    of_ranks: int = 1
    check: Callable[[], None] = lambda: None
    """Called before each file; raises OSError if there is no time left."""

    def of(self, names: Collection[str]) -> list[str]:
        matches = {name: _OF_RANK.search(name) for name in sorted(names)}
        own = range(self.first_rank, self.first_rank + self.ranks)
        others = [name for name, m in matches.items() if m and int(m[1]) % self.of_ranks not in own]
        left_out = set(others) - set(others[:: max(1, len(others) // FEW)])
        return [name for name in matches if name not in left_out]


ALL = Share()


def kind_of(directories: Collection[Path]) -> Kind:
    """The kind of directories that follow each other, such as checkpoint-10 and checkpoint-20."""
    names = {name for path in directories for name in names_in(path)}
    if any(_HOLDS_OTHERS.fullmatch(name) for name in names):
        return ""
    hugging_face = all(re.fullmatch(r"checkpoint-\d+", path.name) for path in directories)
    if hugging_face and names & {"trainer_state.json", "training_args.bin", SENTINEL}:
        return "transformers"
    if any(name.startswith("random_states_") for name in names):
        return "accelerate"
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return "dcp"
    begun = names & {"config.json", "adapter_config.json"}
    begun |= {name for name in names if name.endswith(".safetensors")}
    return "transformers" if hugging_face and begun else ""


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint, or what transformers wrote into it, has; None: it is
    not known."""
    try:
        return int(json.loads((path / "trainer_state.json").read_bytes())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        numbers = _STEP.findall(path.name)
        return int(numbers[-1]) if numbers else None


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def problem(
    kind: Kind, directory: Path, siblings: Collection[Path] = (), share: Share = ALL
) -> str:
    """Part that an incomplete checkpoint lacks; empty: it is complete as far as can be seen.

    `siblings`: complete checkpoints of the same series. Raises OSError.
    """
    names = names_in(directory)
    if not names:
        return "it is empty"
    if kind == "transformers":
        return _transformers(directory, names, share)
    if kind == "accelerate":
        return _accelerate(directory, names, siblings, share)
    begun = any(name.endswith((".distcp", ".metadata.tmp")) for name in names)
    if kind == "dcp" and begun and ".metadata" not in names:
        return "it has no .metadata, which is written last"
    again = kind == "dcp" and begun and not directory.name[-1:].isdigit()
    return _overwritten(directory, names, share) if again else ""


def _overwritten(directory: Path, names: Collection[str], share: Share) -> str:
    """Reason why a folder of DCP that is written repeatedly is torn: a save had begun."""
    written_ns = (directory / ".metadata").stat().st_mtime_ns
    for name in share.of([name for name in names if name.endswith(".distcp")]):
        share.check()
        if (directory / name).stat().st_mtime_ns > written_ns:
            return f"{name} is newer than .metadata, which is written last"
    return ""


def unfinished(kind: Kind, directory: Path) -> str:
    """The same as problem, by what a save writes last, without tensors. Raises OSError."""
    names = names_in(directory)
    return _transformers_end(directory, names) if kind == "transformers" else ""


def torn(path: Path) -> str:
    """Problem of a torch.save or safetensors file; empty: none or not known. Raises OSError."""
    size = path.stat().st_size
    if not size:
        return f"{path.name} is empty"
    if path.suffix == ".safetensors":
        return _torn_safetensors(path, size)
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return ""  # not written by torch.save, or in its format from before torch 1.6
    try:
        with zipfile.ZipFile(path):
            return ""
    except zipfile.BadZipFile:
        return f"{path.name} ends in the middle"


def _torn_safetensors(path: Path, size: int) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES and length + 8 <= size:
            return ""
        header = file.read(min(length, MAX_HEADER_BYTES))
    try:
        tensors = json.loads(header)
        ends = [e["data_offsets"][1] for name, e in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"{path.name} ends in its header"
    expected = 8 + length + max(ends, default=0)
    return f"{path.name} has {size} of {expected} bytes" if size < expected else ""


def _torn_files(directory: Path, names: Collection[str], share: Share) -> Iterator[str]:
    for name in share.of(names):
        share.check()
        path = directory / name
        if path.suffix in SAVED_SUFFIXES and path.is_file():
            yield torn(path)
        elif name.endswith(".index.json"):
            yield _index_problem(path)
        elif name.startswith(("pytorch_model_fsdp", "optimizer_")) and path.is_dir():
            yield "" if ".metadata" in names_in(path) else f"{name} has no .metadata"


def _index_problem(path: Path) -> str:
    """Problem of weights in several files: the index names all of them."""
    try:
        wanted = set(json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{path.name} is torn"
    missing = sorted(wanted - names_in(path.parent))
    return f"{missing[0]} is missing" if missing else ""


def _transformers(directory: Path, names: set[str], share: Share) -> str:
    if gap := _transformers_end(directory, names):
        return gap
    if "latest" in names and (gap := deepspeed_problem(directory, share)):
        return gap
    return next(filter(None, _torn_files(directory, names, share)), "")


def _transformers_end(directory: Path, names: set[str]) -> str:
    if SENTINEL in names:
        return f"it has {SENTINEL}"
    if "trainer_state.json" not in names:
        return "it has no trainer_state.json, which is written last"
    try:
        json.loads((directory / "trainer_state.json").read_bytes())
    except ValueError:
        return "trainer_state.json is torn"
    if not any(_WEIGHTS.fullmatch(name) for name in names):
        return "it has no weights"
    return ""


def _accelerate(directory: Path, names: set[str], siblings: Collection[Path], share: Share) -> str:
    if "random_states_0.pkl" not in names:
        return "it has no random_states_0.pkl, which rank 0 writes after the model"
    if not any(_WEIGHTS.fullmatch(name) for name in names):
        return "it has no weights"
    own = [{n for n in names_in(s) if n.startswith("custom_checkpoint_")} for s in siblings]
    missing = sorted(set.intersection(*own) - names) if own else []
    if missing:
        return f"it has no {missing[0]}, which the checkpoints before it have"
    return next(filter(None, _torn_files(directory, names, share)), "")


# -- DeepSpeed --------------------------------------------------------------------------------
def tags_in(directory: Path) -> list[Path]:
    """The tags below a directory with `latest`, the newest first."""
    folders = [folder for folder in directory.iterdir() if folder.is_dir()]
    tags = [f for f in folders if any(name.endswith("_states.pt") for name in names_in(f))]
    return sorted(tags, key=lambda one: one.stat().st_mtime_ns, reverse=True)


def tag_of_latest(directory: Path) -> Path | None:
    """Folder that `latest` names; None: there is no such folder."""
    latest = directory / "latest"
    if not latest.is_file():
        return None
    tag = directory / latest.read_text(encoding="utf-8", errors="replace").strip()
    return tag if tag != directory and tag.is_dir() else None


def optimizer_parts(tag: Path) -> tuple[int, int]:
    """(ranks among which ZeRO has divided the optimizer in this folder, ranks of model parallelism
    with such a division each); (0, 0): it has not."""
    shards = _optimizer_shards(names_in(tag)) if tag.is_dir() else set()
    return len({rank for rank, _ in shards}), len({model_rank for _, model_rank in shards})


def _optimizer_shards(names: Collection[str]) -> set[tuple[int, int]]:
    matches = (_OPTIMIZER_SHARD.search(name) for name in names)
    return {(int(match[1]), int(match[2])) for match in matches if match is not None}


def deepspeed_problem(directory: Path, share: Share = ALL) -> str:
    """Reason why what `latest` names cannot be loaded; empty: it can, as far as can be seen."""
    tag = (directory / "latest").read_text(encoding="utf-8", errors="replace").strip()
    if not tag:
        return "latest is empty"
    if not (directory / tag).is_dir():
        return f"latest names {tag}, which does not exist"
    gap = tag_problem(directory / tag, share)
    return f"latest names {tag}: {gap}" if gap else ""


def tag_problem(tag: Path, share: Share = ALL) -> str:
    """Part that an incomplete tag lacks; empty: none that can be seen. The number of ranks that
    wrote it is known only from the files themselves: a missing last one is not seen."""
    names = names_in(tag)
    if not any(name.endswith("_model_states.pt") for name in names):
        return "it has no model states"
    shards = {rank for rank, _model_rank in _optimizer_shards(names)}
    missing = sorted(set(range(max(shards, default=-1) + 1)) - shards)
    if missing:
        return f"the optimizer states of rank {missing[0]} are missing"
    return next(filter(None, _torn_files(tag, names, share)), "")

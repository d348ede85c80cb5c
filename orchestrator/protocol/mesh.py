"""The device mesh: axes, rank <-> coordinates, replica groups.

Axes from outermost to innermost, as in TorchTitan (ParallelDims): pipeline, replicate, shard,
context, tensor. Ranks are numbered row-major, so neighbours on the innermost axis are neighbouring
ranks. A *shard index* numbers the ranks of one replica group: two ranks with the same shard index
hold the same training state.
"""

from __future__ import annotations

import msgspec

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


class Mesh(msgspec.Struct, frozen=True):
    """Sizes of the axes; their product is the world size."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of AXES."""
        return (self.pipeline, self.replicate, self.shard, self.context, self.tensor)

    @property
    def world_size(self) -> int:
        return self.replicate * self.num_shards

    @property
    def num_shards(self) -> int:
        """Ranks of one replica group, which together hold one copy of the training state."""
        return self.pipeline * self.shard * self.context * self.tensor

    @property
    def num_fsdp_shards(self) -> int:
        """Ranks among which FSDP2 divides a parameter; ranks of a context axis hold the same."""
        return self.shard * self.context

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis. Raises ValueError outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: got {rank}; expected 0 to {self.world_size - 1}")
        position: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, position[axis] = divmod(rank, size)
        return {axis: position[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; missing axes are 0."""
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            index = coordinates.get(axis, 0)
            if not 0 <= index < size:
                raise ValueError(f"{axis}: got {index}; expected 0 to {size - 1}")
            rank = rank * size + index
        return rank

    def shard_index(self, rank: int) -> int:
        """Part of the training state that a rank holds: 0..num_shards-1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: got {rank}; expected 0 to {self.world_size - 1}")
        inner = self.shard * self.context * self.tensor  # the axes after replicate
        return rank // (self.replicate * inner) * inner + rank % inner

    def data_parallel_index(self, rank: int) -> int:
        """Slice of the global batch that a rank reads: 0..data_parallel_size-1."""
        at = self.coordinates(rank)
        return at["replicate"] * self.shard + at["shard"]

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """All ranks whose coordinates equal `rank`'s except on `axis`."""
        at = self.coordinates(rank)
        size = dict(zip(AXES, self.sizes, strict=True))[axis]
        return tuple(self.rank(**{**at, axis: index}) for index in range(size))

    def twins(self, rank: int) -> tuple[int, ...]:
        """The other ranks that hold the same shard: the replicate group without `rank`."""
        return tuple(other for other in self.group("replicate", rank) if other != rank)

    def redundant(self, workers_per_node: int) -> bool:
        """True if two nodes at least have each shard, so that the loss of one leaves a copy. The
        replicas of a pipeline's stage may all be on one node, as its axis is the outermost."""
        stride = self.shard * self.context * self.tensor
        per_stage = self.replicate * stride
        firsts = (
            stage * per_stage + rank for stage in range(self.pipeline) for rank in range(stride)
        )
        return all(
            first // workers_per_node != (first + per_stage - stride) // workers_per_node
            for first in firsts
        )

    def shards_per_node(self, workers_per_node: int) -> int:
        """The most different shards that the ranks of one node hold."""
        shards = [self.shard_index(rank) for rank in range(self.world_size)]
        nodes = range(0, self.world_size, workers_per_node)
        return max(len(set(shards[first : first + workers_per_node])) for first in nodes)

    def describe(self) -> str:
        """`replicate 2 x shard 2`; axes of size 1 are left out."""
        parts = [f"{a} {n}" for a, n in zip(AXES, self.sizes, strict=True) if n > 1]
        return " x ".join(parts) or "one rank"

    @property
    def strategy(self) -> str:
        """The usual name of this kind of parallelism, such as `HSDP + TP`."""
        data = ("HSDP" if self.replicate > 1 else "FSDP") if self.shard > 1 else ""
        data = data or ("DDP" if self.replicate > 1 else "")
        inner = {"TP": self.tensor, "CP": self.context, "PP": self.pipeline}
        names = [data, *(name for name, size in inner.items() if size > 1)]
        return " + ".join(filter(None, names)) or "single"

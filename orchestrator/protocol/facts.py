"""Facts that workers and agents report: values shared by messages, events and the journal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec

from .mesh import Mesh

WorkerPhase = Literal["start", "build", "restore", "compile", "train", "evaluate", "save", "finish"]
"""A worker's present activity. The measured hang timeout applies to `train` only."""

PREPARING: tuple[WorkerPhase, ...] = ("build", "restore", "compile", "finish")
"""Phases that explain why no step was counted."""


def steps_done(step: int) -> str:
    """`1 step`, `18 steps`: the count that people read; `step` is an index from 0."""
    return f"{step + 1} step{'s' * (step != 0)}"


def state_after(step: int) -> str:
    return f"the state after {steps_done(step)}"


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory_bytes: int
    device: str = ""
    """GPU's value in CUDA_VISIBLE_DEVICES; empty: its position among the GPUs."""


class Processor(msgspec.Struct, frozen=True):
    """A machine's processors."""

    name: str = "CPU"
    flags: tuple[str, ...] = ("avx2", "fma")
    """Flags of hardware.INSTRUCTIONS, as in /proc/cpuinfo."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a node that its agent reports."""

    hostname: str
    address: str
    """Address at which other nodes reach this one, for MASTER_ADDR and the data port."""
    data_port: int
    """Port at which the agent serves its memory tier to other agents."""
    slots: int
    """Number of workers that the node has room for."""
    cpus: int = 0
    processor: Processor = Processor()
    memory_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    visible_devices: tuple[str, ...] = ()
    """Names in the agent's CUDA_VISIBLE_DEVICES; empty: it is not set."""
    address_interface: str = ""
    """The interface of `address`; empty: unknown."""
    hcas: tuple[str, ...] = ()
    """RDMA devices as `name` or `name:link layer`, such as `mlx5_0:InfiniBand`: the names under
    /sys/class/infiniband and the content of their ports/1/link_layer."""
    failure_domain: str = ""
    """Nodes with the same value may be lost together; empty: the node is a domain of its own."""
    topology: tuple[str, ...] = ()
    """Zone, rack, ..., outermost first; ranks are assigned in this order."""
    pid: int = 0
    cache_directory: str = ""
    """Directory for what torch.compile and Triton compile; empty: torch's or the user's choice."""


class StagedShard(msgspec.Struct, frozen=True):
    """One rank's complete training state of one step, in a node's memory."""

    step: int
    generation: int
    shard: int
    """Shard index, see mesh.Mesh.shard_index."""
    num_shards: int
    num_bytes: int

    def written(self, file: str, checksum: str, coverage: CoverageSum) -> ShardFile:
        identity = (self.step, self.generation, self.shard, self.num_shards)
        return ShardFile(*identity, file, self.num_bytes, checksum, coverage)


class CoverageSum(msgspec.Struct, frozen=True):
    """Sums of the values and tensors that a shard file holds, as two sums modulo 2**64
    (protocol/coverage.py). Equal as long as the layout of the file is."""

    weighted: int = 0
    """Sum over all boxes: parts of the tensor x sum over the corners of the box."""
    whole: int = 0
    """Total over all tensors in the file: sum over the corners of the whole tensor."""


class ShardFile(msgspec.Struct, frozen=True):
    """One rank's training state of one step as a durable file in the storage tier."""

    step: int
    generation: int
    shard: int
    num_shards: int
    file: str
    """Name relative to the checkpoint's directory."""
    num_bytes: int
    checksum: str
    """xxh3_128 of the whole file, hex."""
    coverage: CoverageSum = CoverageSum()


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a worker in a step. A worker's message, a heartbeat, the event of a finished
    step and the view of a job all inherit it, so that a new number is declared here only."""

    loss: float | None = None
    """Loss of this step on the CPU. On a GPU the loss of the step before, because the host would
    have to wait for the device; that of the last step follows at the end."""
    tokens: int = 0
    """Tokens of the global batch of that step."""
    step_s: float = 0.0
    stall_s: float = 0.0
    """Time the last staging blocked the training loop."""
    copy_s: float = 0.0
    """Time of its copy from the device, which runs beside the training; 0 on the CPU."""
    staging_s: float = 0.0
    """Time from its beginning to its end, checksums included."""
    copies_thrown_away: int = 0
    """Copies of this generation, because a tensor was written during its copy from the device."""
    device_memory_peak_bytes: int = 0
    """Peak of torch's tensors on a GPU. On a CPU what the process grew by since the session began:
    its peak of resident memory less files and shared memory; 0: not known."""
    sent_bytes: int = 0
    """Bytes that the rank sent in the collectives of one step, measured once in a generation; 0:
    nothing, or not known."""
    flops_per_step: float = 0.0
    """Model FLOPs of one step of the whole job; 0: the training loop does not report them."""
    total_steps: int = 0
    """Steps that a script says it will train; 0: it does not say."""


def report_fields(report: StepReport) -> dict[str, Any]:
    """The measured numbers alone, for another struct that inherits StepReport."""
    return {name: getattr(report, name) for name in StepReport.__struct_fields__}


def largest(reports: Sequence[StepReport]) -> dict[str, Any]:
    """The largest of each number; the loss comes from the first report that has one."""
    loss = next((report.loss for report in reports if report.loss is not None), None)
    names = [name for name in StepReport.__struct_fields__ if name != "loss"]
    return {"loss": loss} | {name: max(map(attrgetter(name), reports)) for name in names}


AGAIN = "survivors run the script again in their process"
"""End of the reason why survivors do not keep their state."""
StepSource = Literal["", "session", "script", "counted", "posted", "collectives"]
"""Origin of a worker's step count: no one yet, a loop whose state Holdfast keeps (`Session.step`),
a script that keeps its own checkpoints (`session.report`), a hook in the script's framework (each
step, and not what else it does), or a program that posts the progress of all ranks now and then
(protocol of Kubeflow Trainer). Of a job also `collectives`: no one, but its ranks begin
collectives."""
SCRIPT_SOURCES: tuple[StepSource, ...] = ("posted", "counted", "script")
"""Sources of scripts that keep their own checkpoints, the most exact one last."""


class WorkerBeat(StepReport, frozen=True, kw_only=True):
    """The progress of one worker; `step` is the last one it finished."""

    rank: int
    phase: WorkerPhase = "start"
    step: int = -1
    ticks: int = 0
    """Grows with every sign of progress, also within a step (micro-batches, phases)."""
    quiet_s: float = 0.0
    """Seconds since the last sign of progress, on the agent's clock; unless the session counts the
    steps, also since the last collective was begun."""
    pulse_age_s: float = 0.0
    """Seconds since the last signal of the worker's pulse thread; grows when the process is stopped
    or the interpreter is blocked."""
    stopped: bool = False
    """The process is stopped (state T of /proc/PID/stat)."""
    work_s: float = 0.0
    """Median over the last steps of the training thread's time outside waits; 0: not known."""
    probe_s: float = 0.0
    """Median over the last probes of the GPU's time for the same work; 0: not known."""
    idle_s: float = 0.0
    """Seconds for which the processes of the worker used no CPU, did not wait for it, and did no
    I/O; 0: they did, or it was not measured."""
    counted_by: StepSource = ""
    began_after: int | None = None
    """The step after which the worker began, unless Holdfast counts its steps; None: not known."""
    began_estimated: bool = False
    """True if the script may have begun a few steps earlier or later."""
    began_s: float | None = None
    """Seconds since a framework that posts its progress began to train; None: not known."""
    collectives: int = 0
    """Collectives that the worker has begun, in all process groups; 0: none, or not known."""
    leaves: bool = False
    """The script has run to its end; threads and exit functions may still take their time."""
    keeps: bool | str = ""
    """True if rank 0 keeps its process when a peer fails; of each rank, why not; else empty."""

    @property
    def silent(self) -> bool:
        return is_silent(self.step, self.phase, self.began_after)


def is_silent(step: int, phase: WorkerPhase, began_after: int | None) -> bool:
    """No step of the worker was ever counted, it has not said that it begins to count, and it does
    not prepare for that. A script may use other phases and never report a step."""
    return step < 0 and began_after is None and phase not in PREPARING


def counting(beats: Iterable[WorkerBeat]) -> list[WorkerBeat]:
    """Beats whose steps count: a script's ranks that report steps, otherwise all."""
    all_beats = list(beats)
    return [beat for beat in all_beats if beat.counted_by in SCRIPT_SOURCES] or all_beats


USAGE_CODE = 2
"""Exit code of argparse, and of others, for wrong arguments."""
CRASH_SIGNALS = (4, 6, 7, 8, 11, 31)
"""A process raises these on itself when its native code breaks; the others come from outside."""


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """End of one worker."""

    rank: int
    local_rank: int = 0
    code: int | None = None
    """Exit code; None: a signal ended the worker."""
    signal: int | None = None
    by_us: bool = False
    """The agent sent the signal because the controller asked for it."""
    step: int = -1
    """The last step that the worker finished."""
    error_type: str = ""
    error_message: str = ""
    traceback: str = ""
    secondary: bool = False
    """The error reports a lost peer or connection: a consequence, not a cause."""
    out_of_memory: bool = False
    at_ns: int = 0
    """Wall clock of the node."""
    ago_s: float = 0.0
    """Seconds between the end and its report. An agent without a controller reports later."""


StackActivity = Literal["peers", "device", "staging", "engine", "reads", "compiles", "nothing", ""]
"""Activity of a worker's main thread, by its innermost frames: a collective with its peers, a wait
for its device, a wait for its copy or its agent, the autograd engine (which computes, and waits for
collectives, in native code), a read, a compiler, or none of these. Empty: unknown."""


class GroupProgress(msgspec.Struct, frozen=True):
    """Progress of one rank in one process group, from torch's flight recorder."""

    group: str
    """Name of the group, the same on all its ranks."""
    label: str
    sequence: int
    """Number of the newest collective that this rank has begun, from 1."""
    operation: str
    done: bool
    """True if that collective is complete on this rank."""


class Stack(msgspec.Struct, frozen=True):
    """The Python stack of a worker, and what it shows."""

    rank: int
    text: str
    in_collective: bool
    """The main thread waits for its peers, so the worker is probably not the cause."""
    state: str = ""
    """State letter of /proc/PID/stat: T is stopped, D uninterruptible, R running, S sleeping."""
    activity: StackActivity = ""
    groups: tuple[GroupProgress, ...] = ()
    """Empty: the flight recorder is off, or the worker did not answer."""
    place: str = ""
    """Innermost frame of the main thread, `function (file:line)`; empty: unknown."""


SuspectBasis = Literal["stopped", "no-pulse", "unreported", "behind", "none", ""]
"""The first suspect of a hang by its heartbeats: its process is stopped, its interpreter is
blocked, it has never reported, it is behind the others, or nothing. Empty: not recorded."""


class WorkerSeat(msgspec.Struct, frozen=True):
    """Place of one worker in a launch."""

    rank: int
    local_rank: int
    shard: int
    persists: bool
    """The rank's agent writes the shard to storage; one of each replicate group does."""


class ShardLocation(msgspec.Struct, frozen=True):
    """A node whose memory holds a shard."""

    shard: int
    node: str
    address: str
    data_port: int


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """State after `step` that a generation restores: from memory (sources), storage (directory)."""

    step: int
    generation: int
    """The generation that wrote the state."""
    num_shards: int
    stages: int = 1
    """Stages of the pipeline that wrote the state, each with as many of the shards."""
    sources: tuple[ShardLocation, ...] = ()
    """Sources in the order of the shards."""
    directory: str = ""
    """Directory of a committed checkpoint, relative to the checkpoint path; empty: from memory."""


class OwnCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a rank of a script wrote by itself."""

    path: str
    """A file or a folder, without links up to its last name."""
    generation: int
    """The one that wrote it last."""
    times: int = 1
    """Number of writes by one generation, at most."""
    read_by: int = 0
    """The last generation whose rank 0 read it."""
    failed: bool = False
    """True if that start ended with an error of the script before it trained."""


class LaunchIncident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident that led to a launch, as its workers receive it. Its steps lost and duration
    are known only when they train again."""

    number: int
    """Number in the job, from 1."""
    at_ns: int
    """Unix time of the controller's machine."""
    failure_class: str
    """user, infrastructure, preemption, hang; resize, suspend, new-code for planned ones."""
    title: str
    """`worker 2 on node-1 was killed by SIGKILL`."""
    decision: str = ""
    """`restart on 2 nodes, from memory after 42 steps`; empty: the next incident came first."""
    last_step: int = -1
    """The last step that all ranks are known to have finished before it; -1: none, or not known."""
    last_step_at_least: bool = False
    """Ranks were lost without a last report: it may be a few more."""
    rehearsal: bool = False
    """A user caused it with `holdfast debug`."""
    world_size_before: int
    world_size_after: int


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes, ranks and mesh of one generation; the same on all its nodes."""

    generation: int
    mesh: Mesh
    num_nodes: int
    workers_per_node: int
    master_address: str
    master_port: int
    restart_count: int
    """Generations before this one; the same number on every node (TORCHELASTIC_RESTART_COUNT)."""
    restore: Restore | None = None
    micro_batch: int = 0
    """Samples of a forward pass of the recipe, by the memory of the devices; 0: as the recipe
    chooses without."""
    ahead: bool = False
    """Workers are started beside the running generation, which this number names: they build, try a
    step without peers and wait for their seats in the next one."""
    kept_from: int = 0
    """Workers that the agents have kept since this generation go on in this one with their process,
    and new ones connect to them when they restore; 0: all are new."""
    incidents: tuple[LaunchIncident, ...] = ()
    """Reason why this generation was launched, oldest first, for what the script logs to. The
    runtime adds them to the message; no decision depends on them."""
    own_checkpoints: tuple[OwnCheckpoint, ...] = ()
    """Checkpoints that the script is known to have written, the last one last. As `incidents`."""

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def with_sources_of(self, shards: Iterable[int]) -> Membership:
        """The same with the sources of these shards only: those of all shards of a large job are
        megabytes."""
        if self.restore is None or not self.restore.sources:
            return self
        sources, kept = self.restore.sources, []
        for shard in sorted(set(shards)):
            at = bisect_left(sources, shard, key=lambda source: source.shard)
            while at < len(sources) and sources[at].shard == shard:
                kept.append(sources[at])
                at += 1
        restore = msgspec.structs.replace(self.restore, sources=tuple(kept))
        return msgspec.structs.replace(self, restore=restore)

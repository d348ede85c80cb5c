"""Session: the API that a training loop calls, and `init`, which makes it.

It keeps the order of a worker's life (init, restore, steps, finish), decides when to stage, and
reports to the agent.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import files
from holdfast.orchestrator.protocol.facts import Restore, WorkerPhase, steps_done
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.checkpoint.given_optimizers import Given
from holdfast.workers.checkpoint.placement import expect_mesh
from holdfast.workers.checkpoint.rank_state import EXTRA_KEY, RankState
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.shard_sources import CheckpointFiles, ShardSource
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import Extra, TrainingState
from holdfast.workers.checkpoint.upload import CudaUpload, Uploader
from holdfast.workers.session.order import mix

from . import agent_channel, inspection, numa, reporting
from .attempts import (
    AttemptHalted,
    Attempts,
    checksum,
    num_graphs,
    reset,
    settings_digest,
    versions,
    why_not,
)
from .distributed import Meshes, RankEnv, expect_on, join, own_store, pick_device, rank_env
from .groups import Groups, NotKept, ReplicasDiverged, why_not_formed
from .loss import LossReport
from .measures import PeakMemory, SentBytes
from .shards import Shards
from .twins import TwinGroup
from .work_time import GpuProbe, WorkMeter

if TYPE_CHECKING:
    from .data import ElasticLoader

COMPILED = "torch.compile has compiled for this size"
"""Dynamo makes sizes of groups and meshes constants, without a guard."""
CHECKED_STEPS = 2
"""DDP rearranges its buckets after its first step, so the second one is compared too."""


class Session:
    """One worker's part of a job. `session.init()` makes one for each process.

    `rank`, `local_rank`, `world_size` and `restart_count` are those of torchrun; `device` is the
    torch.device of this rank; `generation` counts the launches of the job, from 1.
    """

    def __init__(self, at: RankEnv, device: torch.device, shape: Mesh) -> None:
        attached = worker_transport.attached
        self._take_seat(at, shape, attached)
        self.device = device
        self.meshes = Meshes(shape, device.type)
        self._channel = agent_channel.of_process()
        self._attempts = Attempts(None, "")
        self._loops = False
        self._why_no_loop: Callable[[], str] | None = None
        """Reason why the loop of a framework cannot begin again; None: the script's own loop."""
        self._read_within, self._read_outside = set[str](), set[str]()
        """Sizes and places of this rank that were read, in attempts and outside them."""
        self._num_compared = CHECKED_STEPS
        """Steps since processes were kept whose parameters were compared between replicas."""
        self._shards_given: list[Shards] = []
        self._modes: list[bool] = []
        """Mode of each module of the model: True for training."""
        self._volatile: dict[str, int] = {}
        self._checkpoint_path = attached.assign.checkpoint_path if attached else ""
        self.directory = working_directory(attached) if attached else "."
        """Working directory of the job, to which paths in the recipe's settings are relative."""
        self._checkpoint = attached.job.spec.checkpoint if attached else None
        self._stager: Stager | None = None
        self._state: TrainingState | None = None
        self._data: list[ElasticLoader] = []
        self._twins: TwinGroup | None = None
        """Exchange between ranks with state of their own."""
        self._last_step, self._last_staged, self._first_step, self._total = -1, -1, 0, -1
        self._stall_s = 0.0
        self._loss = LossReport(device.type)
        self._memory = PeakMemory(device)
        # gloo's sends, of a pipeline, are not recorded.
        self._sent = SentBytes(complete=device.type == "cuda" or shape.pipeline == 1)
        self._reported: worker_protocol.Progress | None = None
        self._step_began = time.perf_counter()
        compared = self._channel is not None and shape.world_size > 1
        # On a GPU the host's time shows nothing of the device's.
        self._work = WorkMeter() if compared and device.type == "cpu" else None
        self._probe = GpuProbe(device) if compared and device.type == "cuda" else None

    def _take_seat(
        self, at: RankEnv, shape: Mesh, attached: worker_transport.Attached | None
    ) -> None:
        """Take a kept process's seat in the next generation."""
        self.rank, self.local_rank = at.rank, at.local_rank
        self.restart_count = at.restart_count
        self.shape = shape
        """Sizes of the mesh's axes, and the coordinates of each rank."""
        self.generation = attached.assign.membership.generation if attached else 1
        self._kept = bool(attached and attached.assign.membership.kept_from)
        """Processes were kept in this generation."""
        self._ahead = bool(attached and attached.assign.membership.ahead)
        """This process has no seat yet: it was started beside the running generation."""
        self._restore = attached.assign.membership.restore if attached else None

    # -- ranks and mesh -------------------------------------------------------------------------
    def _reads(self, what: Literal["rank", "size", "mesh"]) -> None:
        """The script depends on it here."""
        (self._read_within if self._attempts.is_open else self._read_outside).add(what)

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """A loader gives a batch, which is not interrupted: its processes outlive an attempt."""
        if self._loops and self._why_no_loop is None and not self._attempts.is_open:
            raise UserError(
                "session.data: got a batch taken outside an attempt; expected `batch = "
                "next(loader)` within `with s.attempt():`, also for each epoch's first batch"
            )
        self._reads("rank")
        self._reads("size")
        with self._attempts.shielded():
            yield

    @property
    def _seat(self) -> tuple[int, int]:
        """data_parallel_rank and data_parallel_size, for what follows their changes."""
        return self.shape.data_parallel_index(self.rank), self.shape.data_parallel_size

    @property
    def world_size(self) -> int:
        self._reads("size")
        return self.shape.world_size

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh with named axes: `replicate`, `shard`, and those of `tensor`, `context`
        and `pipeline` that are larger than 1. Made on first use, which is collective."""
        self._reads("mesh")
        return self.meshes.all_axes

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for fully_shard: (`shard`,) for FSDP, (`replicate`, `shard`) for HSDP. With a
        context axis `shard_context`, which has the ranks of both, takes the place of `shard`. Made
        on first use, which is collective."""
        self._reads("mesh")
        return self.meshes.data_parallel

    @property
    def data_parallel_rank(self) -> int:
        """Slice of the global batch that this rank reads: 0 to data_parallel_size - 1."""
        self._reads("rank")
        return self.shape.data_parallel_index(self.rank)

    @property
    def data_parallel_size(self) -> int:
        """Number of slices of the global batch: replicate x shard."""
        self._reads("size")
        return self.shape.data_parallel_size

    @property
    def restoring(self) -> bool:
        """True if restore() will fill the model; if so, initial values need not be computed."""
        return self._restore is not None

    @property
    def may_keep(self) -> bool:
        """Survivors of a failure may keep their process, as far as is known."""
        return self._attempts.groups is not None and not self._attempts.why_not

    @property
    def next_step(self) -> int:
        """The step that follows the last one. It is known before `restore`."""
        if self._ahead and not self._loops:
            self._await_seat()
        return (self._restore.step if self._restore and not self._state else self._last_step) + 1

    def seed(self, seed: int, step: int) -> None:
        """Seeds `random` and torch (all devices) from (seed, step, data_parallel_rank).

        Called at every step, it makes random numbers continue after a restore without saved state.
        """
        value = mix(seed, step, self.shape.data_parallel_index(self.rank))
        self._attempts.seeds()
        random.seed(value)
        torch.manual_seed(value)

    @contextmanager
    def context_parallel(self, *whole: Tensor, dim: int = 1) -> Iterator[tuple[Tensor, ...]]:
        """Divides sequences over the context axis for one forward and backward, which belong
        inside:

            with s.context_parallel(inputs_bt, targets_bt) as (inputs_bt, targets_bt, positions_t):
                loss = ...  # of this rank's tokens, over the tokens of the whole batch
                loss.backward()

        `whole` are tensors with the sequence (T) in dimension `dim`, the same on all ranks of the
        axis. Yields this rank's parts of them, and the positions of these parts in the sequence
        (T / context) of int64, for the model's position embedding: the parts are two pieces, so
        that causal attention costs each rank the same. Inside, `F.scaled_dot_product_attention` is
        torch's ring over all parts: causal, without a mask and without dropout. Without a context
        axis, `whole` and all positions are yielded.

        Raises UserError for a sequence that 2 x context does not divide.
        """
        if self.shape.context == 1:
            yield (*whole, torch.arange(whole[0].shape[dim], device=whole[0].device))
            return
        from .context import divide  # with much of torch

        with divide(self.meshes.axis("context"), *whole, dim=dim) as parts:
            yield parts

    def shards(self, model: nn.Module) -> Shards:
        """This rank's parts of a sharded model as plain tensors, to make an optimizer from. It
        starts faster after a recovery, and steps faster, than an optimizer over DTensors.

            shards = s.shards(model)
            optimizer = torch.optim.AdamW(shards.parameters())
            ...
            loss.backward()
            shards.clip_grad_norm_(1.0)  # 0: no clipping; it moves the gradients
            optimizer.step()
            optimizer.zero_grad()

        Call it after `fully_shard` and `to_empty`; `restore` accepts such an optimizer. With a
        pipeline `model` has the parameters of this rank's stages, and the norm is that of all
        stages. Raises UserError for parameters on the meta device, and for parameters that are
        partial sums.
        """
        _expect_memory("session.shards", model)
        shards = Shards(model, self.device, self.shape.world_size, self.shape.pipeline)
        self._shards_given.append(shards)
        return shards

    def data(
        self,
        loader: Any,
        *,
        epochs: int | None = None,
        global_batch: int | None = None,
        seed: int | None = None,
    ) -> ElasticLoader:
        """This rank's batches of a loader: each sample once an epoch, over restarts and resizes.

            loader = s.data(DataLoader(data, batch_size=8, shuffle=True, num_workers=2))
            step = s.restore(model, optimizer)
            for epoch in range(loader.epoch, 3):
                for batch in loader:
                    ...
                    s.step(step, loss=loss)
                    step += 1

        `loader` is a DataLoader of torch or torchdata, or one that accelerate prepared, over the
        whole data: samples are divided among the ranks here, in an order that depends on `seed` and
        the epoch. Its batch size is a rank's, or the share of `global_batch`. An iteration has the
        rest of an epoch; after the last of `epochs` it has nothing. `next(loader)` goes on with the
        next epoch; attempts use it, or `itertools.islice(loader, num)` for micro-batches. `s.step`
        stores the position behind the batches that were taken. What samples draw from random
        generators in this process depends on the position alone. Raises UserError for loaders that
        divide or skip samples by themselves, and, when its position is restored, for data of
        another size or order.
        """
        from .data import ElasticLoader

        data = ElasticLoader(loader, self, epochs=epochs, global_batch=global_batch, seed=seed)
        self._data.append(data)
        if self._state is not None:
            self._state.load_position(len(self._data) - 1, data)
        return data

    # -- the loop -----------------------------------------------------------------------------
    def restore(
        self,
        model: nn.Module,
        optimizer: Given,
        extra: Extra = None,
        *,
        per_rank: Mapping[str, Any] | None = None,
        start: int = 0,
        keep: Literal["all", "trainable"] = "all",
    ) -> int:
        """Fills model, optimizer and extra from the newest checkpoint; returns the next step.

        Returns `start` and changes nothing if there is no checkpoint; a script that has read
        another one gives the step that follows it. Call it once, after the model is sharded and
        the optimizer made. The mesh may differ from that of the checkpoint.

        `optimizer` is one, or a list, tuple or dict of all that step parameters of the model. In
        wrappers with `.optimizer` or `.optimizers`, such as those of accelerate and torchtitan, the
        optimizers inside are taken. `extra` is an object with state_dict and load_state_dict, or a
        dict of JSON values and of such objects by name; it is stored with every checkpoint, and the
        same on all ranks. `per_rank` are objects whose state differs from rank to rank, by name: a
        data loader with state_dict, a generator of torch, numpy or random, or one of them in a
        PerRank, which says what happens when the number of ranks changes. With `keep="trainable"`
        parameters that are frozen now, such as the base of a LoRA, are neither staged nor stored
        nor restored: the script loads them in each start. They may be quantized.

        Raises UserError for a wrong call, for optimizers whose state no checkpoint would have, for
        a model that is sharded otherwise than the mesh of the job, and for `per_rank` state of
        another number of ranks; WrongModel or WrongOptimizer if names, shapes or groups differ from
        the checkpoint; DamagedCheckpoint and UnreadableCheckpoint if it cannot be read.
        """
        if keep not in ("all", "trainable"):
            raise UserError(f"session.restore: got keep={keep!r}; expected all or trainable")
        if self._state is not None:
            raise UserError("session.restore: got a second call; expected one, before the loop")
        _expect_memory("session.restore", model)
        expect_on(self.device, ((name, p.device) for name, p in model.named_parameters()))
        self._enter("restore")
        own = RankState(per_rank, self.rank, self.shape) if per_rank else None
        self._state = TrainingState(model, optimizer, extra, own, self._say, self._data, keep)
        if own is not None and self._channel is not None and self.shape.replicate > 1:
            self._twins = TwinGroup((self.rank, *self.shape.twins(self.rank)))
            own.join(self._twins)
        if self._channel is not None:
            self._expect_mesh(self._state)
            self._state.expect_storable()
        if self.shape.pipeline > 1:
            parts: list[Any] = [None] * self.shape.pipeline  # of all stages
            pipeline = self.meshes.axis("pipeline").get_group()
            dist.all_gather_object(parts, self._state.stage_part(), group=pipeline)
            self._state.join_stages(parts)
        groups = self._attempts.groups
        if self._ahead:
            self._last_step = self._restore.step if self._restore else start - 1
            self._volatile = versions(model)
            self._first_step = self._last_step + 1
            return self._last_step + 1  # s.steps tries a step, then waits for the seat
        if groups is not None and not groups.connected:
            self._connect(groups)
        elif groups is not None and inspection.num_collectives() > groups.num_collectives:
            self._attempts.why_not = "the script has collectives before restore"
        self._begin_at(self._state, start)
        return self._last_step + 1

    def _begin_at(self, state: TrainingState, start: int) -> None:
        """Load what this generation restores, and be ready for the step after it."""
        source = self._restore
        if source is not None:
            self._load(source, state)
            self._last_step = self._last_staged = source.step
            if self._kept and not all(data.is_drawn_again for data in self._data):
                raise NotKept("a sampler draws another order than before")
        else:
            self._last_step = start - 1
        self._first_step = self._last_step + 1
        if self._attempts.groups is not None:
            self._num_compared = 0
        self._volatile = versions(state.model)
        if self._channel is not None:
            self._stager = Stager(
                state,
                self._channel,
                generation=self.generation,
                shard=self.shape.shard_index(self.rank),
                num_shards=self.shape.num_shards,
                device=self.device,
            )
            self._stager.prepare()
            self._channel.begin(self._last_step, "train")
        self._share_whether_due()
        self._attempts.count_collectives()
        self._begin_step()

    # -- attempts -----------------------------------------------------------------------------
    def steps(self, total_steps: int | None = None) -> Iterator[int]:
        """The steps from the result of restore to `total_steps`, or to the last of the `epochs` of
        s.data, for a loop that survives the loss of a peer in its process:

            loader = s.data(DataLoader(data, batch_size=8, shuffle=True), epochs=3)
            s.restore(model, optimizer)
            for step in s.steps():
                with s.attempt():
                    loss = train_one(model, optimizer, next(loader))
                    s.step(step, loss=loss)

        When a worker or node dies, the others keep their process, model and optimizer where that is
        possible (`recovery.keepProcesses`): the attempt ends without an error, wherever it is, and
        the loop goes on with the step after the restored one. So a step may be attempted again:
        what the body changes beside the model, the optimizer and `extra` it must change by step,
        and read its data by step, or from s.data. A worker of a node that joins first attempts a
        step without peers, as warm-up: s.step ends it, and what it has computed is dropped. Raises
        UserError before restore, without an end, and for a body without an attempt or s.step.
        """
        if self._state is None:
            raise UserError(
                "session.steps: got a call before restore; expected s.restore(model, optimizer)"
            )
        if total_steps is None and all(data.epochs is None for data in self._data):
            raise UserError(
                "session.steps: got no end; expected total_steps, or s.data(loader, epochs=...)"
            )
        first_step, self._total = self._last_step + 1, total_steps or -1
        for step in self._rounds(self._state):
            if step < first_step:
                raise NotKept("the restored step is before the first one of this loop")
            ends = total_steps is not None and step >= total_steps
            if ends or any(data.is_over for data in self._data):
                return
            self._begin_attempt(self._state, step)
            yield step
            if not self._attempts.over:
                self._attempts.expect_stepped(step)

    def loops(self, why_not: Callable[[], str]) -> Iterator[int]:
        """A framework's own loop, which is begun again in a process that is kept:

            for step in s.loops(why_not):
                with s.attempt():
                    ...  # the framework's loop from `step` on; it calls s.step

        Each s.step begins the next attempt; phases belong to none, and end with the process. The
        framework seeds all generators in each step. `why_not`: reason why its loop cannot begin
        again.
        """
        assert self._state is not None
        self._why_no_loop = why_not
        for step in self._rounds(self._state):
            self._begin_attempt(self._state, step)
            yield step
            if not self._attempts.over:
                return

    def _rounds(self, state: TrainingState) -> Iterator[int]:
        """The step with which a loop goes on: after each attempt, and restored after a halted
        one."""
        self._loops = True
        try:
            while True:
                if self._attempts.over:
                    self._resume(state)
                self._attempts.rehearses = self._ahead
                if self._ahead and self._attempts.groups is not None:
                    self._attempts.groups.pretend(alone=True)
                yield self._last_step + 1
        finally:
            self._loops = False

    def _begin_attempt(self, state: TrainingState, step: int) -> None:
        self._want_keeping(state)
        if self._attempts.groups is not None:
            self._modes = [module.training for module in state.model.modules()]
        seeds = self._why_no_loop is not None
        first, kept = step == self._first_step and not seeds, self._kept and not seeds
        self._attempts.begin(first=first, kept=kept)

    def attempt(self) -> Attempts:
        """`with s.attempt():` around the body of a loop over s.steps. Whatever needs the peers of
        the job belongs inside. An error of the body itself ends the script, as without it. Raises
        UserError without s.steps, and within another attempt."""
        if not self._loops:
            raise UserError(
                "session.attempt: got no loop over s.steps; expected `for step in "
                "s.steps(total_steps):` around it"
            )
        return self._attempts

    def _want_keeping(self, state: TrainingState) -> None:
        """Say after the first step of a generation whether this process can be kept."""
        attempts = self._attempts
        if self._channel is None or self._last_step < self._first_step:
            return
        now = num_graphs()
        attempts.num_graphs = now if attempts.num_graphs is None else attempts.num_graphs
        if attempts.said or (attempts.said == "" and now == attempts.num_graphs):
            return
        attempts.said = self._why_not(state)
        attempts.wanted = attempts.wanted or not attempts.said  # a halt may be on its way
        self._channel.send(worker_protocol.KeepReported(why_not=attempts.said))

    def _why_not(self, state: TrainingState) -> str:
        """Reason why this process cannot be kept as it is; empty: it can."""
        groups, why = self._attempts.groups, self._attempts.why_not
        if groups is None or why:
            return why
        if groups.foreign:
            return "torch has groups of other backends"
        if groups.scales:
            return "a GradScaler is in use"
        if self.shape.pipeline > 1:
            return "the model is a pipeline"
        if state.rank_state is not None:
            return "single ranks have state"
        if self._why_no_loop is not None and (why := self._why_no_loop()):
            return why
        if self._why_no_loop is None and state.lacks_schedule:
            return "restore did not get the learning rate's schedule, which new processes begin"
        if self._why_no_loop is not None and num_graphs():
            return "the framework's model is compiled"
        if self._attempts.num_graphs not in (None, num_graphs()):
            # A new process would run what it compiles in its first step: other kernels.
            return "torch.compile compiles again after the first step"
        return why_not(state.model, self._volatile)

    def _resume(self, state: TrainingState) -> None:
        """Wait, in a kept process, for a seat in the next generation, and restore its state."""
        channel, attempts, groups = self._channel, self._attempts, self._attempts.groups
        if not (attempts.wanted or self._ahead):
            raise AttemptHalted  # the script runs again
        assert channel is not None and groups is not None
        attempts.halted()
        attempts.look_at_random(leaves=True)
        if why := self._why_not(state):  # since the first step
            channel.send(worker_protocol.KeepReported(why_not=why))
            if attempts.runs_again is not None:
                attempts.wanted = False
                raise AttemptHalted
            time.sleep(2 * limits.HALT_S)  # the agent kills this process
            raise NotKept(why)
        before = self.shape.world_size
        self._await_seat()
        attempts.resumed()
        if self.shape.world_size != before:
            if num_graphs():
                raise NotKept(COMPILED)
            self.meshes.resized(self.shape)
        self._enter("build")
        self._connect(groups)
        reset(state.model, groups, self._modes)
        for shards in self._shards_given:
            shards.resized(self.shape.world_size)
            for parameter in shards.parameters():
                parameter.grad = None
        for optimizer in state.optimizers:
            optimizer.optimizer.state.clear()
        self._begin_at(state, 0)

    def _await_seat(self) -> None:
        """Wait for a seat in the next generation."""
        channel, groups = self._channel, self._attempts.groups
        assert channel is not None and groups is not None
        if self._ahead:
            groups.pretend(alone=False)
        why = self._why_fixed_size()
        attached = channel.next_seat(worker_protocol.Halted(step=self._last_step, fixed_size=why))
        if not attached.assign.membership.kept_from:
            self._attempts.wanted, self._attempts.seated = False, True
            raise AttemptHalted  # the script runs again
        self._take_seat(rank_env(), attached.assign.membership.mesh, attached)

    def _why_fixed_size(self) -> str:
        """Reason why the script would go on with what it has computed from another size; empty: it
        reads the size in each step, and nowhere else."""
        if num_graphs():
            return COMPILED
        if self._why_no_loop is not None:
            return "the framework divides its data when it starts"
        if "size" in self._read_outside:
            return "the script reads data_parallel_size or world_size outside its attempts"
        if not self._read_within >= {"rank", "size"}:
            return "attempts do not read both data_parallel_rank and data_parallel_size"
        return "attempts read a mesh, whose sizes stay" if "mesh" in self._read_within else ""

    def _connect(self, groups: Groups) -> None:
        attached = worker_transport.attached
        assert attached is not None
        store = own_store(rank_env(), one_machine=attached.assign.membership.num_nodes == 1)
        at = (self.rank, self.shape.world_size, self.generation)
        groups.connect(store, *at, lambda: self._attempts.halting)

    def _compare_replicas(self, state: TrainingState, step: int) -> None:
        """Compare the replicas' parameters and the optimizers' settings: in the first steps of a
        generation and, once processes were kept, in each step that goes to storage. Where they
        differ before that, none is kept: the script means it, or has an error. Raises
        ReplicasDiverged where they differ afterwards. Collective."""
        late = self._kept and self._checkpoint is not None and self._checkpoint.stores(step)
        if not self._loops or (self._num_compared >= CHECKED_STEPS and not late):
            return
        parameters = [p for p in state.parameters.values() if p.requires_grad]
        if not self._num_compared:
            parameters = [*state.parameters.values(), *state.left_out.values()]
        self._num_compared += 1
        number = checksum(parameters)
        common = settings_digest(optimizer.optimizer for optimizer in state.optimizers)
        # The last row: settings, such as the learning rate, that are the same on all ranks.
        largest_s2 = torch.full((self.shape.num_shards + 1, 2), -(2**63), dtype=torch.int64)
        largest_s2[self.shape.shard_index(self.rank)] = torch.tensor([number, -number])
        largest_s2[-1] = torch.tensor([common, -common])
        dist.all_reduce(largest_s2, dist.ReduceOp.MAX)
        differ_s = largest_s2.sum(1) != 0
        if not differ_s.any():
            return
        differing = "learning rates or settings" if differ_s[-1] else "parameters"
        said = f"ranks have different {differing}"
        if self._kept:
            raise ReplicasDiverged(f"{said} after {steps_done(step)}, since processes were kept")
        self._num_compared, self._attempts.why_not = CHECKED_STEPS, said

    def step(
        self,
        step: int,
        *,
        loss: float | Tensor | None = None,
        tokens: int = 0,
        flops: float = 0.0,
        total_steps: int = 0,
    ) -> None:
        """Reports that step `step` is finished, and stages the state if it is due.

        Call it once after every optimizer step, with consecutive numbers from the result of
        restore. `loss` (a number or a scalar tensor) is shown in status and metrics, that of a
        tensor on a GPU with the next step, so that the host does not wait for the device; `tokens`
        and `flops` (model FLOPs) are those of the global batch of this step; `total_steps` is how
        many the script will train. Raises UserError for a wrong number.
        """
        if self._state is None:
            raise UserError(
                f"session.step: got step {step} before restore; expected `start = "
                "s.restore(model, optimizer)` first, and a loop from start"
            )
        if self._ahead and not self._loops:
            raise NotKept("the script trains without s.steps")
        self._attempts.expect_running()
        if step != self._last_step + 1:
            raise UserError(
                f"session.step: got {step}; expected {self._last_step + 1}; call it once after "
                "every optimizer step, counting from the result of restore"
            )
        if self._loops:
            ends = step + 1 in (total_steps, self._total) or any(d.is_over for d in self._data)
            self._attempts.expect_open(step, is_last=ends)
        with self._attempts.shielded():
            self._attempts.look_at_random()
            if self._kept and self._attempts.why_not:
                raise ReplicasDiverged(self._attempts.why_not)
            self._end_step(step, loss, tokens=tokens, flops_per_step=flops, total_steps=total_steps)
            if self._why_no_loop is not None:
                self._begin_attempt(self._state, step + 1)
            elif not self._loops and step == self._first_step and self._channel is not None:
                self._channel.trains()
                why = self._attempts.why_not or "the script has no loop over s.steps"
                self._channel.send(worker_protocol.KeepReported(why_not=why))

    def _end_step(self, step: int, loss: float | Tensor | None, **reported: Any) -> None:
        assert self._state is not None
        now = time.perf_counter()
        self._compare_replicas(self._state, step)
        self._last_step = step
        reported["step_s"] = now - self._step_began
        reported["work_s"] = self._work.end() if self._work is not None else 0.0
        if self._channel is not None:
            self._sent.end()
        due, hold = self._due(step) if self._twins is None else self._twins.agreed()
        if due:
            self.save()
        if hold and self._stager is not None:
            self._stager.finish()  # the agent must get the shard before the report of the step
        reported["probe_s"] = self._probe.end() if self._probe is not None else 0.0
        self._report(step, loss, **reported)
        self._begin_step(now)
        if hold and self._channel is not None:
            self._channel.hold()
            self._begin_step()
        self._share_whether_due()

    def save(self) -> None:
        """Stages the state of the last finished step now, regardless of the interval.

        Raises UserError before the first finished step.
        """
        if self._state is None or self._last_step < 0:
            raise UserError(
                "session.save: got no finished step; expected restore and step before it"
            )
        self._attempts.expect_running()
        if self._stager is not None and self._last_staged != self._last_step:
            self._stall_s = self._stager.stage(self._last_step)
            self._last_staged = self._last_step

    @contextmanager
    def phase(self, name: WorkerPhase) -> Iterator[None]:
        """`with s.phase("evaluate"):` the hang timeout inside is 600 s instead of a few step times.

        `name` is build, compile, train, evaluate or save. Raises UserError for another one.
        """
        began = time.perf_counter()
        outside = self._attempts.suspended() if self._why_no_loop else contextlib.nullcontext()
        before = num_graphs()
        with reporting.phase(name), outside:
            yield
        if name == "evaluate" and self.shape.tensor == 1 and self._attempts.num_graphs is not None:
            self._attempts.num_graphs += num_graphs() - before  # steps do not run them
        self._begin_step(self._step_began + time.perf_counter() - began)
        self._sent.skip()  # what is sent in a phase is not of the step

    def tick(self) -> None:
        """Reports progress within a long step or phase, such as a finished micro-batch."""
        if self._channel is not None:
            self._channel.send(worker_protocol.ProgressTick())

    def finish(self) -> None:
        """Ends the training loop: stages the last state, which the agent then persists."""
        if self._ahead:
            raise NotKept("the script has no step left")
        self._enter("finish")
        if self._stager is not None and self._last_step >= 0:
            self.save()
            if not self._stager.finish():  # written after the last step: stage it as it is now
                self._last_staged = -1
                self.save()
                self._stager.finish()
        self._report_last_loss()
        if self._channel is not None:
            self._channel.send(worker_protocol.Finished(step=self._last_step))
            self._channel.stop_pulse()

    def _begin_step(self, at_s: float | None = None) -> None:
        """Begin a step: what was done since the last one, such as staging, is not its work."""
        self._step_began = time.perf_counter() if at_s is None else at_s
        self._sent.begin()
        if self._work is not None:
            self._work.begin()

    # -- internal ---------------------------------------------------------------------------------
    def _expect_mesh(self, state: TrainingState) -> None:
        divided = expect_mesh(state.parameters, self.shape, self.rank)
        num = self.shape.num_shards // self.shape.pipeline
        if not divided and num > 1 and self.rank == 0:
            print(
                f"holdfast: the model is not sharded, but the mesh is {self.shape.describe()}: "
                f"each of {num} ranks keeps a whole copy. `parallelism: {{shard: 1}}` below "
                "`spec:` in the job's YAML keeps one.",
                file=sys.stderr,
            )

    def _due(self, step: int) -> tuple[bool, bool]:
        """True to stage this step, and true if a planned stop follows it."""
        channel, checkpoint = self._channel, self._checkpoint
        if channel is None or checkpoint is None:
            return False, False
        # The agent's interval may be longer: of `auto`, and where memory is short. It requests no
        # step if every one is staged.
        interval = max(channel.stage_every(step), checkpoint.staging_interval)
        requests = checkpoint.memory.every_steps == "auto" or interval > 1
        hold = channel.stage_requested(step) if requests else None
        return hold is not None or checkpoint.stages(step, interval), bool(hold)

    def _share_whether_due(self) -> None:
        if self._twins is not None:
            due, hold = self._due(self._last_step + 1)
            self._twins.share(due=due, hold=hold)

    def _enter(self, phase: WorkerPhase) -> None:
        if self._channel is not None:
            self._channel.enter(phase)

    def _load(self, source: Restore, state: TrainingState) -> None:
        opener: Callable[[int], ShardSource]
        if source.directory:
            opener, stored_stages = self._from_storage(source)
        else:
            assert self._channel is not None
            opener, stored_stages = self._channel.fetch, source.stages
        extra = restore(
            state,
            opener,
            shard=self.shape.shard_index(self.rank),
            num_shards=self.shape.num_shards,
            num_stored=source.num_shards,
            step=source.step,
            stages=self.shape.pipeline,
            stored_stages=stored_stages,
            tick=self.tick,
            upload=Uploader(CudaUpload()) if self.device.type == "cuda" else None,
        )
        state.import_extra(extra)
        if EXTRA_KEY in extra and state.rank_state is None:
            names = ", ".join(map(repr, extra[EXTRA_KEY]["names"]))
            self._say(
                f"the checkpoint has state of single ranks ({names}), and the script gives no "
                "per_rank: it is not restored"
            )

    def _say(self, text: str) -> None:
        """Prints it on rank 0, where the job's events get it too."""
        if self.rank == 0:
            print(f"holdfast: {text}", file=sys.stderr)
            if self._channel is not None:
                self._channel.send(worker_protocol.Noted(text=text))

    def _from_storage(self, source: Restore) -> tuple[Callable[[int], ShardSource], int]:
        store = CheckpointFiles(self._checkpoint_path)
        manifest = store.manifest(source.directory)
        files = {file.shard: file for file in manifest.files}
        return lambda shard: store.open(source.directory, files[shard]), manifest.mesh.pipeline

    def _report(self, step: int, loss: float | Tensor | None, **more: Any) -> None:
        if self._channel is None:
            return
        self._reported = worker_protocol.Progress(
            step=step,
            loss=self._loss.swap(loss),
            stall_s=self._stall_s,
            copy_s=self._stager.copy_s if self._stager else 0.0,
            staging_s=self._stager.staging_s if self._stager else 0.0,
            copies_thrown_away=self._stager.num_thrown_away if self._stager else 0,
            device_memory_peak_bytes=self._memory.read(),
            sent_bytes=self._sent.num_bytes,
            **more,
        )
        self._channel.send(self._reported)

    def _report_last_loss(self) -> None:
        """Report the last step's loss: on a GPU each report has the loss of the step before."""
        loss = self._loss.last()
        if loss is not None and self._reported is not None and self._channel is not None:
            self._channel.send(msgspec.structs.replace(self._reported, loss=loss))


def _expect_memory(call: str, model: nn.Module) -> None:
    if any(p.is_meta for p in model.parameters()):
        raise UserError(
            f"{call}: got parameters on the meta device; expected real memory; call "
            "model.to_empty(device=session.device) first"
        )


def working_directory(attached: worker_transport.Attached) -> str:
    spec_directory = attached.assign.spec_directory
    return str(files.resolve(spec_directory, attached.job.spec.working_directory))


def init(shard: int | None = None, tensor: int = 1, context: int = 1, pipeline: int = 1) -> Session:
    """Joins the job: sets the device, makes the default process group, and connects to the agent.

    Under Holdfast the mesh is that of the generation. Under torchrun, or as a single process,
    nothing is staged or reported, `tensor`, `context` and `pipeline` are the sizes of these axes,
    and `shard` times as many ranks share one replica of the model (default: all). Raises UserError
    for wrong sizes or environment, and DeviceMissing if the node lacks a GPU that the job
    requested.
    """
    at = rank_env()
    attached = worker_transport.attached
    if attached:
        shape = attached.assign.membership.mesh
    else:
        shape = _mesh_without_agent(at, shard, tensor, context, pipeline)
    device = pick_device(at.local_rank, attached.job if attached else None)
    if attached is not None and device.type == "cuda":
        numa.bind_to(device)
    session = Session(at, device, shape)
    if session._channel is not None:
        session._channel.start_pulse()
    why = _why_not_kept(session, attached)
    if why and (session._kept or session._ahead):
        raise NotKept(why)
    of_script = dist.is_initialized()
    groups = join(at, device, attached.assign.membership if attached else None, keeps=not why)
    why = why or ("" if groups else "the script has made its process groups")
    attempts = (Attempts.of_script or Attempts(None, "")).in_session(groups, why)
    session._attempts = attempts
    if session._channel is not None:
        session._channel.halt, session._channel.is_over = attempts.halt, lambda: attempts.halting
    session._enter("build")
    if session._ahead and of_script:
        session._await_seat()  # a framework's loop is not tried
    return session


def _why_not_kept(session: Session, attached: worker_transport.Attached | None) -> str:
    """Reason why survivors of this job do not keep their process; empty: they may."""
    if attached is None or attached.job.spec.recovery.keep_processes == "never":
        return "recovery.keepProcesses is never"
    if attached.take_seat is None:
        return "the script runs in an interpreter of its own"
    if session.device.type != "cpu":
        return "this is not proved with NCCL yet"
    return "it is the only rank" if session.shape.world_size == 1 else why_not_formed()


def _mesh_without_agent(
    at: RankEnv, shard: int | None, tensor: int, context: int, pipeline: int
) -> Mesh:
    room, sizes = at.world_size, {"tensor": tensor, "context": context, "pipeline": pipeline}
    for axis, asked in {**sizes, "shard": shard}.items():
        size = room if asked is None else asked
        if size < 1 or room % size:
            raise UserError(f"session.init: got {axis}={size}; expected a divisor of {room} ranks")
        room //= size
    return Mesh(replicate=room, shard=size, **sizes)


def leave() -> None:
    """Destroys the process group; call it last."""
    if dist.is_initialized():
        dist.destroy_process_group()

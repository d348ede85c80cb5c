"""Session: what a training loop calls.

Owns: the order of a worker's life (init, restore, steps, finish), when to stage, and what is
reported. Must not: know how tensors are copied or how the agent keeps them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import files
from holdfast.orchestrator.protocol.facts import Restore, WorkerPhase
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.shard_sources import CheckpointFiles, ShardSource
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import Extra, TrainingState
from holdfast.workers.training.data import mix

from .agent_channel import AgentChannel
from .distributed import Meshes, RankEnv, join, pick_device, place
from .shards import Shards

_PHASES: tuple[WorkerPhase, ...] = ("build", "compile", "train", "evaluate", "save")


class Session:
    """One worker's part of a job. Made by `session.init()`, once per process."""

    def __init__(self, at: RankEnv, device: torch.device, shape: Mesh) -> None:
        attached = worker_transport.attached
        self.rank, self.local_rank, self.world_size = at.rank, at.local_rank, at.world_size
        self.restart_count = at.restart_count
        self.device = device
        self.shape = shape
        """Sizes of the axes, and who is where on them."""
        self.meshes = Meshes(shape, device.type)
        self.generation = attached.assign.membership.generation if attached else 1
        self._link = AgentChannel(attached.link) if attached else None
        self._restore = attached.assign.membership.restore if attached else None
        self._checkpoint_path = attached.assign.checkpoint_path if attached else ""
        self.directory = working_directory(attached) if attached else "."
        """What relative paths in the spec are relative to."""
        self._stage_every = attached.job.spec.checkpoint.staging_interval if attached else 0
        self._stager: Stager | None = None
        self._state: TrainingState | None = None
        self._last_step, self._last_staged = -1, -1
        self._stall_s = 0.0
        self._step_began = time.perf_counter()

    # -- who and where ------------------------------------------------------------------------
    @property
    def mesh(self) -> DeviceMesh:
        """All axes by name: `replicate`, `shard`, and tensor, context, pipeline where > 1."""
        return self.meshes.all_axes

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh to give to fully_shard: one axis for FSDP, two for HSDP."""
        return self.meshes.data_parallel

    @property
    def data_parallel_rank(self) -> int:
        """Which slice of the global batch is this rank's."""
        return self.shape.data_parallel_index(self.rank)

    @property
    def data_parallel_size(self) -> int:
        return self.shape.data_parallel_size

    @property
    def restoring(self) -> bool:
        """restore() will fill the model: values it has before that do not matter."""
        return self._restore is not None

    def seed(self, seed: int, step: int) -> None:
        """Sets every generator of this process from (seed, step, position in the global batch).

        Nothing has to be saved for random numbers to go on after a restore.
        """
        value = mix(seed, step, self.data_parallel_rank)
        random.seed(value)
        torch.manual_seed(value)

    def shards(self, model: nn.Module) -> Shards:
        """This rank's own parts of a sharded model, to make an optimizer from: quicker to start
        after a recovery, and in every step, than an optimizer over DTensors.

            shards = s.shards(model)
            optimizer = torch.optim.AdamW(shards.parameters())
            ...
            loss.backward()
            shards.clip_grad_norm_(1.0)  # or shards.take_gradients()
            optimizer.step()
            optimizer.zero_grad()

        Call it after `fully_shard` and `to_empty`; `restore` takes such an optimizer as any other.
        Raises UserError with a pipeline axis, whose ranks hold different parameters, and for
        parameters that are partial sums.
        """
        if self.shape.pipeline > 1:
            raise UserError(
                f"session.shards: got a mesh with {self.shape.pipeline} pipeline stages; expected "
                "none, as the gradient norm is taken over ranks that hold the same parameters; "
                "make the optimizer from model.parameters()"
            )
        if any(p.is_meta for p in model.parameters()):
            raise UserError(
                "session.shards: got parameters on the meta device; expected real memory; call "
                "model.to_empty(device=session.device) first"
            )
        return Shards(model, self.device, self.world_size)

    # -- the loop -----------------------------------------------------------------------------
    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Extra = None
    ) -> int:
        """Fills model, optimizer and extra with the state to go on from; returns the next step.

        0 when there is nothing to go on from. `extra` is a dict of JSON values or anything with
        state_dict and load_state_dict; it is stored with every checkpoint. Call it once, after the
        model is sharded and the optimizer made. Raises UserError, DamagedCheckpoint, OtherModel.
        """
        if self._state is not None:
            raise UserError("session.restore: got a second call; expected one, before the loop")
        if any(p.is_meta for p in model.parameters()):
            raise UserError(
                "session.restore: got parameters on the meta device; expected real memory; call "
                "model.to_empty(device=session.device) first"
            )
        self._enter("restore")
        self._state = TrainingState(model, optimizer, extra)
        wanted = self._restore
        if wanted is not None:
            self._load(wanted, self._state)
            self._last_step = self._last_staged = wanted.step
        if self._link is not None:
            self._stager = Stager(
                self._state,
                self._link,
                generation=self.generation,
                shard=self.shape.shard_index(self.rank),
                num_shards=self.shape.num_shards,
                device=self.device,
            )
            self._stager.prepare()
        self._enter("train")
        self._step_began = time.perf_counter()
        return self._last_step + 1

    def step(
        self,
        step: int,
        *,
        loss: float | Tensor | None = None,
        tokens: int = 0,
        flops: float = 0.0,
    ) -> None:
        """Step `step` is done: stages the state when it is due, then reports.

        `loss` is what to show; `tokens` and `flops` are those of the global batch.
        """
        if self._state is None:
            raise UserError(
                f"session.step: got step {step} before restore; expected `start = "
                "s.restore(model, optimizer)` first, and a loop from start"
            )
        if step != self._last_step + 1:
            raise UserError(
                f"session.step: got {step}; expected {self._last_step + 1}; call it once after "
                "every optimizer step, counting on from what restore returned"
            )
        self._last_step = step
        now = time.perf_counter()
        step_s = now - self._step_began
        hold = self._ordered(step)
        if hold is not None or (self._stage_every and (step + 1) % self._stage_every == 0):
            self.save()
        if hold and self._stager is not None:
            self._stager.finish()  # the agent must not hear of the step before it is there
        self._report(step, loss, tokens, flops, step_s)
        self._step_began = now
        if hold and self._link is not None:
            self._link.hold()
            self._step_began = time.perf_counter()

    def save(self) -> None:
        """Stages the state of the last finished step now, whatever the cadence says."""
        if self._state is None or self._last_step < 0:
            raise UserError(
                "session.save: got no finished step; expected restore and step before it"
            )
        if self._stager is not None and self._last_staged != self._last_step:
            self._stall_s = self._stager.stage(self._last_step)
            self._last_staged = self._last_step

    @contextmanager
    def phase(self, name: WorkerPhase) -> Iterator[None]:
        """`with s.phase("evaluate"):` what happens inside is not held to the step time."""
        if name not in _PHASES:
            raise UserError(f"session.phase: got {name!r}; expected one of {', '.join(_PHASES)}")
        before = self._link.phase if self._link else "train"
        began = time.perf_counter()
        self._enter(name)
        yield
        self._enter(before)
        self._step_began += time.perf_counter() - began

    def tick(self) -> None:
        """A sign of progress within a step or phase, such as a micro-batch."""
        if self._link is not None:
            self._link.send(worker_protocol.Tick())

    def finish(self) -> None:
        """The loop is through: the last state is staged for the agent to persist."""
        self._enter("finish")
        if self._stager is not None and self._last_step >= 0:
            self.save()
            self._stager.finish()
        if self._link is not None:
            self._link.send(worker_protocol.Finished(step=self._last_step))
            self._link.stop_pulse()

    # -- inside -------------------------------------------------------------------------------
    def _begin(self) -> None:
        if self._link is not None:
            self._link.start_pulse()

    def _ordered(self, step: int) -> bool | None:
        """None unless the controller wants this very step; whether its end follows. Who stages all
        of them is never asked."""
        if self._link is None or self._stage_every <= 1:
            return None
        return self._link.ordered(step)

    def _enter(self, phase: WorkerPhase) -> None:
        if self._link is not None:
            self._link.enter(phase)

    def _load(self, wanted: Restore, state: TrainingState) -> None:
        opener = self._from_storage(wanted) if wanted.directory else self._from_memory
        extra = restore(
            state,
            opener,
            shard=self.shape.shard_index(self.rank),
            num_shards=self.shape.num_shards,
            num_stored=wanted.num_shards,
            step=wanted.step,
        )
        state.import_extra(extra)

    def _from_memory(self, shard: int) -> ShardSource:
        assert self._link is not None
        return self._link.fetch(shard)

    def _from_storage(self, wanted: Restore) -> Any:
        store = CheckpointFiles(self._checkpoint_path)
        manifest = store.manifest(wanted.directory)
        files = {file.shard: file for file in manifest.files}
        return lambda shard: store.open(wanted.directory, files[shard])

    def _report(
        self, step: int, loss: float | Tensor | None, tokens: int, flops: float, step_s: float
    ) -> None:
        if self._link is None:
            return
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        self._link.send(
            worker_protocol.Progress(
                step=step,
                loss=None if loss is None else float(loss),
                tokens=tokens,
                step_s=step_s,
                stall_s=self._stall_s,
                device_memory_peak_bytes=peak,
                flops_per_step=flops,
            )
        )


def working_directory(attached: worker_transport.Attached) -> str:
    spec_directory = attached.assign.spec_directory
    return str(files.resolve(spec_directory, attached.job.spec.working_directory))


def init(shard: int | None = None) -> Session:
    """Joins the job: device, process group, mesh, and the node's agent where there is one.

    Under Holdfast the mesh is the membership's. Outside (torchrun, a single process) nothing is
    staged or reported, and `shard` ranks share one copy of the model; by default all do.
    Raises UserError, and DeviceMissing where the node lacks a GPU that the job asked for.
    """
    at = place()
    attached = worker_transport.attached
    shape = attached.assign.membership.mesh if attached else _mesh_outside(at, shard)
    device = pick_device(at.local_rank, attached.job if attached else None)
    session = Session(at, device, shape)
    session._begin()
    join(at, device, own_store=attached is not None)
    session._enter("build")
    return session


def _mesh_outside(at: RankEnv, shard: int | None) -> Mesh:
    shard = at.world_size if shard is None else shard
    if shard < 1 or at.world_size % shard:
        raise UserError(
            f"session.init: got shard={shard}; expected a divisor of {at.world_size} ranks"
        )
    return Mesh(replicate=at.world_size // shard, shard=shard)


def leave() -> None:
    """Ends the process group; the last thing a process does."""
    if dist.is_initialized():
        dist.destroy_process_group()

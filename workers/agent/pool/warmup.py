"""Warm-up of a standby: one training step before it has a rank, to create lazy state.

A model takes a step on process groups that move no data, which creates the state of autograd,
oneDNN, FSDP2 and DTensor, and for a recipe also the heap and the text. The warm-up must not touch
CUDA, run before a fork (backward starts threads), or leave a process group, a changed random state
or another number of threads.

Measured for 3.3 M parameters, HSDP 2 x 2, CPU time of one rank from Assign to the end of the first
step: a recipe 0.39 s without warm-up, 0.24 s with it, of which the step itself is 0.15 s; a script
with its own loop 0.58 s without, 0.47 s with it: DTensor derives the layouts of clip_grad_norm_ and
AdamW for each mesh (0.18 s), and the warm-up must not use the real mesh, see Meshes. The warm-up
takes 0.26 s. A failure is printed and ignored: the real start reports the same error better.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.fsdp import fully_shard

from holdfast.orchestrator.api.v1alpha1 import Pretrain, TrainingJob
from holdfast.orchestrator.api.v1alpha1.recipe import Model, pretraining
from holdfast.orchestrator.protocol import files
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.session.core import Session
from holdfast.workers.session.distributed import Meshes, RankEnv
from holdfast.workers.training.loop import train_step
from holdfast.workers.training.models.transformer import Transformer
from holdfast.workers.training.recipes import pretrain


def warm(job: TrainingJob, directory: str = ".") -> None:
    """One step on the CPU: of the recipe pretrain, or of a small model for a script that imports
    holdfast.session. Nothing for others: they expect a fresh process.

    `directory` is the base of the relative paths in the spec.
    """
    if job.spec.resources.num_gpus or dist.is_initialized():
        return
    recipe, config = job.spec.entrypoint.recipe, pretraining(job.spec.entrypoint.recipe)
    if config is None and (recipe is not None or not calls_session(job, directory)):
        return
    mesh = likely_mesh(job)
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        with _fake_groups(mesh.world_size):
            session = Session(RankEnv(world_size=mesh.world_size), torch.device("cpu"), mesh)
            session.meshes = Meshes(mesh, "cpu", prefix="warmup_")
            if config is None:
                _warm_loop(session)
            else:
                _warm_recipe(job, config, session)
    except Exception:
        print("the warm-up of this standby failed; the real start follows", file=sys.stderr)
        traceback.print_exc()
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


def calls_session(job: TrainingJob, directory: str) -> bool:
    """True if the entry file itself imports holdfast.session. The file is parsed, not run."""
    entry = job.spec.entrypoint.program
    if entry.is_foreign:
        return False
    name = entry.script or (entry.module or "").replace(".", "/") + ".py"
    try:
        tree = ast.parse(files.resolve(directory, job.spec.working_directory, name).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # the real start reports the error
    return any(_imports_session(node) for node in ast.walk(tree))


def _imports_session(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names):
            modules = [f"{module}.{alias.name}" for alias in names]
        case _:
            return False
    return any(f"{module}.".startswith("holdfast.session.") for module in modules)


def _warm_recipe(job: TrainingJob, config: Pretrain, session: Session) -> None:
    layers = config.model.num_layers // job.spec.parallelism.pipeline_ranks  # of one rank
    model = config.model.model_copy(update={"num_layers": layers})
    # Without its rank and environment it would compile into another cache than workers read.
    config = config.model_copy(update={"model": model, "compile": False})
    trainer = pretrain.build(job, config, session)
    session.restore(trainer.parallel.model, trainer.optimizer)
    trainer.parallel.refuse_non_finite = False
    train_step(trainer, 0)


def _warm_loop(session: Session) -> None:
    """A typical loop: FSDP2 by block, AdamW, a clipped gradient."""
    config = Model(dim=32, num_layers=1, num_heads=2)
    model = Transformer(config)
    for block in model.blocks:
        fully_shard(block, mesh=session.fsdp_mesh)
    fully_shard(model, mesh=session.fsdp_mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    session.restore(model, optimizer)
    inputs_bt = torch.zeros(1, 8, dtype=torch.long)
    loss = F.cross_entropy(model(inputs_bt).flatten(0, 1), inputs_bt.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def likely_mesh(job: TrainingJob) -> Mesh:
    """The mesh at full size, of one stage of a pipeline. A wrong guess costs time at the first step
    only."""
    wanted = job.spec.parallelism
    room = job.spec.nodes.max * job.spec.workers_per_node // wanted.inner
    if isinstance(wanted.shard, int):
        shard = wanted.shard
    elif wanted.replicate != "auto":
        shard = room // wanted.replicate
    else:
        shard = room
    return Mesh(room // shard, shard, wanted.tensor, wanted.context)


@contextlib.contextmanager
def _fake_groups(world_size: int) -> Iterator[None]:
    """Process groups whose collectives return at once. Destroying them resets torch's counters, so
    that ranks with and without warm-up use the same group names."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()

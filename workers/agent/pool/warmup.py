"""Work that a worker can do before it knows its seat: make everything a first step makes once.

Owns: the rehearsal. A model takes one step on process groups that move nothing, so that what is
made lazily exists: autograd's and oneDNN's state, FSDP2's and DTensor's own, and for a recipe the
heap that a step needs and the text. Must not: touch CUDA, run before a fork (backward starts
threads), or leave a process group, a changed random state or a number of threads behind.

Measured for 3.3 M parameters, HSDP 2 x 2, CPU time of one rank from its seat to the first finished
step: the recipe 0.39 s without it, 0.24 s with it, of which the step itself is 0.15 s. A script's
own loop 0.58 s without it, 0.47 s with it: DTensor derives the layouts of clip_grad_norm_ and AdamW
anew for each mesh (0.18 s), and the real mesh must not be rehearsed on, see Meshes. The rehearsal
takes 0.26 s. If it fails, that is shown and ignored: the real start says the same thing better.
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
from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.orchestrator.protocol import files
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.session.core import Session
from holdfast.workers.session.distributed import Meshes, RankEnv
from holdfast.workers.training.models.transformer import Transformer
from holdfast.workers.training.recipes import pretrain


def warm(job: TrainingJob, directory: str = ".") -> None:
    """Rehearses a first step on the CPU: a recipe's own, or for a script that imports
    holdfast.session a small model's. Nothing for other scripts: they expect a fresh process.

    `directory` is what the spec's paths are relative to.
    """
    if job.spec.resources.gpu or dist.is_initialized():
        return
    recipe = job.spec.entrypoint.recipe
    if recipe is None and not calls_session(job, directory):
        return
    mesh = likely_mesh(job)
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        with _quiet_groups(mesh.world_size):
            session = Session(RankEnv(world_size=mesh.world_size), torch.device("cpu"), mesh)
            session.meshes = Meshes(mesh, "cpu", prefix="rehearsed_")
            if recipe is None:
                _rehearse_loop(session)
            else:
                _rehearse_recipe(job, recipe.config, session)
    except Exception:
        print("the rehearsal of a first step failed; the real one follows", file=sys.stderr)
        traceback.print_exc()
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


def calls_session(job: TrainingJob, directory: str) -> bool:
    """Whether the entry file itself imports holdfast.session. Reads it, runs nothing of it."""
    entry = job.spec.entrypoint
    name = entry.script or (entry.module or "").replace(".", "/") + ".py"
    try:
        tree = ast.parse(files.resolve(directory, job.spec.working_directory, name).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # the real start says what is wrong with it
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


def _rehearse_recipe(job: TrainingJob, config: Pretrain, session: Session) -> None:
    trainer = pretrain.build(job, config, session)
    session.restore(trainer.parallel.model, trainer.optimizer)
    trainer.parallel.refuse_non_finite = False
    pretrain.train_step(trainer, 0)


def _rehearse_loop(session: Session) -> None:
    """What most loops have in common: FSDP2 by block, AdamW, a clipped gradient."""
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
    """The mesh at full size. Another one costs time at the first step, nothing else."""
    world = job.spec.nodes.max * job.spec.workers_per_node
    wanted = job.spec.parallelism
    if wanted.shard != "auto":
        shard = wanted.shard
    elif wanted.replicate != "auto":
        shard = world // wanted.replicate
    else:
        shard = world
    return Mesh(replicate=world // shard, shard=shard)


@contextlib.contextmanager
def _quiet_groups(world_size: int) -> Iterator[None]:
    """Process groups whose collectives return at once. Destroying them resets all of torch's
    counters, so that rehearsed and unrehearsed ranks name their groups alike."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()

"""The environment of a worker: every variable that Holdfast sets, with the reason for each.

Values follow from the job, the membership and the node's facts; nothing is read from the machine.

Sources: torch/distributed/elastic/agent/server/local_elastic_agent.py for the contract;
docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html for TORCH_NCCL_*; the list in
torch/csrc/distributed/c10d/FlightRecorder.hpp for TORCH_FR_*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from .. import limits
from ..api.v1alpha1 import TrainingJob
from .fabric import Setting, Source, choose_profile, is_loopback, nccl_settings, socket_settings
from .facts import Membership, NodeFacts, WorkerSeat

__all__ = ["Setting", "Source", "explain_environment"]

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

PROGRESS_URL, PROGRESS_TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"
"""Address to which frameworks post their progress, and the file with the token for it: the names of
Kubeflow Trainer, which transformers (from 5.4) reads by itself. The agent serves it on loopback and
adds them to what this module sets, unless spec.env has them."""

RESUME_FROM = "HOLDFAST_RESUME_FROM_CHECKPOINT"
"""The newest complete checkpoint that the script itself wrote, for frameworks that need its name
(`Trainer.train(resume_from_checkpoint=...)`). The agent sets it when it starts workers again and
has found one; not with a state that Holdfast restores."""

RESUME_SINCE = "HOLDFAST_RESUME_SINCE"
"""Time of the job's submission (wall clock, ns), for trainers that are started again: what they
wrote later is their own. The agent sets it with RESUME_FROM, also if it has found none."""

INCIDENTS = "HOLDFAST_INCIDENTS"
"""The incidents that led to this launch, oldest first: a list of LaunchIncident in JSON. On all
ranks, so that a script may decide by it."""

JOB_ID = "HOLDFAST_JOB_ID"
"""Id of the job, equal on all ranks and in all generations; a new job of the name has another."""

CACHE_VARIABLE = "HOLDFAST_CACHE_DIR"
"""Variable of an agent's environment: where the caches of compilers are kept on its machine. The
local backend sets it; in a pod it can name a volume."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

ALIASES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Present names and the old ones, most of them from before torch 2.8. Each worker would print a
warning about an old name, so Holdfast sets the new ones only; if the user sets an old one, it
overrides the new one."""


def chosen_cache(environment: Mapping[str, str], default: str = "") -> str:
    """The directory for caches of compilers on a machine whose agents have this environment; empty
    if the user has chosen one for a compiler."""
    if any(name in environment for name in CACHES):
        return ""
    return environment.get(CACHE_VARIABLE, default)


def explain_environment(
    job: TrainingJob,
    membership: Membership,
    seat: WorkerSeat,
    node_rank: int,
    facts: NodeFacts,
    *,
    log_directory: str = "",
    job_id: str = "",
) -> list[Setting]:
    """All variables of one worker, in order, with the reason for each value. A variable of the
    user takes the place of Holdfast's; its reason names the value that it replaces. `log_directory`
    gets the flight recorder dumps, if known; `job_id` names the run of a tracker."""
    user, has_gpus = job.spec.env, job.spec.resources.num_gpus > 0
    ours = [
        *_contract(job, membership, seat, node_rank),
        *_identity(job_id),
        *_devices(job, seat, facts),
        *_threads(job, membership, facts),
        *_fabric(job, membership, facts),
        *_recovery(job, log_directory),
        *_caches(job, facts),
        *_trackers(job, seat, job_id),
        *_incidents(job, membership),
    ]
    settings: list[Setting] = []
    for setting in ours:
        alias = ALIASES.get(setting.name, "")
        own = setting.source == "contract" or (setting.name == VISIBLE_DEVICES and has_gpus)
        if own or not (setting.name in user or alias in user):
            settings.append(setting)
            continue
        name = setting.name if setting.name in user else alias
        why = f"spec.env; Holdfast would have set {setting.name}={setting.value}"
        settings.append(Setting(name, user[name], why, "user"))
    names = {setting.name for setting in settings}
    settings += [Setting(n, v, "spec.env", "user") for n, v in user.items() if n not in names]
    return settings


def _contract(
    job: TrainingJob, membership: Membership, seat: WorkerSeat, node_rank: int
) -> Iterator[Setting]:
    """The variables that torchrun sets (with one role, called default)."""
    m = membership
    rows = [
        ("RANK", seat.rank, "this worker, 0 to WORLD_SIZE - 1"),
        ("LOCAL_RANK", seat.local_rank, "number of the worker on this node; selects the device"),
        ("WORLD_SIZE", m.world_size, f"workers of generation {m.generation}"),
        ("LOCAL_WORLD_SIZE", m.workers_per_node, "workers on this node"),
        ("GROUP_RANK", node_rank, "this node, 0 to GROUP_WORLD_SIZE - 1"),
        ("GROUP_WORLD_SIZE", m.num_nodes, f"nodes of generation {m.generation}"),
        ("ROLE_NAME", "default", "all workers have one role"),
        ("ROLE_RANK", seat.rank, "as RANK"),
        ("ROLE_WORLD_SIZE", m.world_size, "as WORLD_SIZE"),
        ("MASTER_ADDR", m.master_address, "the node of rank 0"),
        ("MASTER_PORT", m.master_port, "a free port there, new in every generation"),
        ("TORCHELASTIC_RESTART_COUNT", m.restart_count, "generations before; equal on all nodes"),
        (
            "TORCHELASTIC_MAX_RESTARTS",
            job.spec.recovery.budgets.infrastructure.restarts,
            "the infrastructure budget, for scripts that print it",
        ),
        ("TORCHELASTIC_RUN_ID", job.name, "the job's name"),
        ("TORCHELASTIC_USE_AGENT_STORE", False, "rank 0 hosts the store, so no agent is needed"),
    ]
    for name, value, why in rows:
        yield Setting(name, str(value), why, "contract")


def _identity(job_id: str) -> Iterator[Setting]:
    if job_id:
        yield Setting(JOB_ID, job_id, "the job's id, the same in all generations", "contract")


def _devices(job: TrainingJob, seat: WorkerSeat, facts: NodeFacts) -> Iterator[Setting]:
    """Devices of a worker. With gpu: 0 it sees no GPU, also on a machine that has some; with more
    than one it sees its own only. Otherwise it sees all of the node, as torchrun's do, and
    LOCAL_RANK selects. The backend, or spec.env, decides which GPUs a node has."""
    count = job.spec.resources.num_gpus
    why = f"spec.resources.gpu is {count}"
    named = names_in(job.spec.env.get(VISIBLE_DEVICES)) or facts.visible_devices
    if not count:
        yield Setting(VISIBLE_DEVICES, "", why, "resources")
    elif count == 1 and is_mig(named) and seat.local_rank < len(named):
        why = "CUDA shows one MIG device to a process: this worker's"
        yield Setting(VISIBLE_DEVICES, named[seat.local_rank], why, "resources")
    elif count > 1:
        first = seat.local_rank * count
        if named:
            mine = named[first : first + count]
        else:
            mine = tuple(str(index) for index in range(first, first + count))
        yield Setting(VISIBLE_DEVICES, ",".join(mine), f"{why}: this worker's", "resources")


def is_mig(names: Sequence[str]) -> bool:
    """True if values of CUDA_VISIBLE_DEVICES name parts of GPUs (MIG)."""
    return bool(names) and all(name.startswith("MIG-") for name in names)


def names_in(visible: str | None) -> tuple[str, ...]:
    """The devices that CUDA_VISIBLE_DEVICES names."""
    return tuple(name.strip() for name in (visible or "").split(",") if name.strip())


def _threads(job: TrainingJob, membership: Membership, facts: NodeFacts) -> Iterator[Setting]:
    cpu = job.spec.resources.cpu
    if cpu is not None:
        threads, why = max(1, int(cpu)), f"spec.resources.cpu is {cpu:g}"
    elif facts.cpus:  # 0: not known, in a plan
        workers, where = membership.workers_per_node, "of this node"
        if is_loopback(facts.address):
            # Of the full size, so that a resize does not change the order of any sum.
            workers, where = workers * job.spec.nodes.max, "of this machine at full size"
        threads = max(1, facts.cpus // workers)
        why = f"{facts.cpus} cores shared by {workers} workers {where}"
    else:
        return
    yield Setting("OMP_NUM_THREADS", str(threads), why, "resources")


def _fabric(job: TrainingJob, membership: Membership, facts: NodeFacts) -> Iterator[Setting]:
    fabric, nccl = job.spec.fabric, job.spec.resources.num_gpus > 0
    yield from socket_settings(fabric, facts, nccl=nccl)
    if nccl:
        profile, why = choose_profile(fabric, facts, membership.num_nodes)
        yield from nccl_settings(profile, why, fabric, facts, membership.num_nodes)


def _recovery(job: TrainingJob, log_directory: str) -> Iterator[Setting]:
    """Settings of torch's watchdog and flight recorder that recovery needs."""
    if not job.spec.resources.num_gpus:
        why = "collectives that the flight recorder keeps per rank: they name who hangs"
        yield Setting("TORCH_FR_BUFFER_SIZE", "200", why, "recovery")
        return
    recovery = job.spec.recovery
    timeout_s = max(recovery.startup_timeout_s, limits.SAVE_TIMEOUT_S)
    if recovery.hang_timeout_s != "auto":
        timeout_s = max(timeout_s, recovery.hang_timeout_s)
    rows = [
        (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "3",
            "end the process at once on a communicator error; aborting first can hang",
        ),
        (
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            str(math.ceil(timeout_s) + 60),
            "longer than Holdfast's timeouts, so that stacks are collected before torch aborts",
        ),
        ("TORCH_FR_BUFFER_SIZE", "2000", "collectives that the flight recorder keeps per rank"),
        ("TORCH_FR_DUMP_ON_TIMEOUT", "1", "write the flight recorder when a collective times out"),
    ]
    if log_directory:
        path = f"{log_directory.rstrip('/')}/flight-recorder-rank-"
        rows.append(("TORCH_FR_DUMP_TEMP_FILE", path, "beside the workers' logs"))
    for name, value, why in rows:
        yield Setting(name, value, why, "recovery")


def _caches(job: TrainingJob, facts: NodeFacts) -> Iterator[Setting]:
    """One directory per machine and user, of all jobs and generations: entries are found by the
    hash of what was compiled."""
    if not facts.cache_directory:
        return
    root = facts.cache_directory.rstrip("/")
    why = "a restarted worker finds what torch.compile has compiled"
    yield Setting("TORCHINDUCTOR_CACHE_DIR", f"{root}/inductor", why, "recovery")
    if job.spec.resources.num_gpus:
        yield Setting("TRITON_CACHE_DIR", f"{root}/triton", f"{why}: its kernels", "recovery")


def _trackers(job: TrainingJob, seat: WorkerSeat, job_id: str) -> Iterator[Setting]:
    """W&B begins a run in each process that calls wandb.init, so each restart would be another one.
    Only rank 0 gets these: processes that share a run overwrite each other."""
    if not job_id or seat.rank or job.spec.entrypoint.recipe is not None:
        return
    why = "the job's id: wandb.init continues one run over restarts"
    yield Setting("WANDB_RUN_ID", job_id, why, "recovery")
    yield Setting("WANDB_RESUME", "allow", "begin the run if it is not there yet", "recovery")


def _incidents(job: TrainingJob, membership: Membership) -> Iterator[Setting]:
    if membership.incidents and job.spec.entrypoint.recipe is None:
        text = msgspec.json.encode(membership.incidents).decode()
        yield Setting(INCIDENTS, text, "why the script was started again", "recovery")

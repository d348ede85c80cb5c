"""`python -m holdfast.workers.training.calibrate JOB.yaml`: how long the parts of a step of the
recipe take on this machine.

As many processes as a node has workers measure at the same time, each on its GPU or with its share
of the cores, as they would disturb each other in the job. Each builds a block (on CPUs up to four)
and the head of the job's model and trains them; on CPUs they time an all-reduce as well. Prints
JSON: medians in seconds, of the slowest worker. Exit code 1: it does not fit into memory, or a
process ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import timeit
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from holdfast.orchestrator.api.v1alpha1 import Pretrain, TrainingJob, load_job
from holdfast.orchestrator.api.v1alpha1.recipe import pretraining
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.hardware import cpus
from holdfast.workers.training.loss import token_losses
from holdfast.workers.training.models.transformer import Block, Transformer
from holdfast.workers.training.optimizers import make_optimizer
from holdfast.workers.training.parallel import float8
from holdfast.workers.training.parallel.activations import checkpoint_blocks
from holdfast.workers.training.parallel.precision import autocast, parameter_dtype

WARM_UP = 3
"""Runs before the measured ones: caches, allocators, and compilation."""
BLOCKS_ON_CPU = 4
"""A processor's caches hold the weights and activations of one block, but not of a model."""
MESSAGES = (2**16, 2**24)
"""Bytes of the all-reduces that are timed: latency decides the first, bandwidth the second."""
GROUP_TIMEOUT_S = 120.0
LOOPBACK = "127.0.0.1"


class Settings(NamedTuple):
    """Arguments of each process."""

    file: str
    steps: int
    workers: int
    threads: int
    micro_batch: int
    sharded: bool
    """FSDP2 wraps the model and casts its parameters; otherwise autocast does."""
    port: int
    """Port of the store that the processes meet at."""


def main(arguments: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.workers.training.calibrate")
    parser.add_argument("file", metavar="JOB.yaml")
    parser.add_argument("--steps", type=int, default=20, help="measured runs")
    parser.add_argument("--workers", type=int, help="default: workersPerNode")
    parser.add_argument("--threads", type=int, help="of each; default: an equal share")
    parser.add_argument("--micro-batch", type=int, help="samples; default: one pass of the share")
    parser.add_argument("--sharded", action="store_true", help="as FSDP2 casts, not autocast")
    options = parser.parse_args(arguments)
    try:
        job = load_job(options.file)
        config = _config(job)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return 2
    workers = options.workers or job.spec.workers_per_node
    share = -(-config.global_batch // workers)
    settings = Settings(
        options.file,
        options.steps,
        workers,
        options.threads or _threads(job, workers),
        options.micro_batch or config.samples_per_pass(share, 1),
        options.sharded,
        0,
    )
    try:
        measured = _measure_in_processes(settings)
    except (MemoryError, torch.OutOfMemoryError, BrokenProcessPool) as error:
        why = "a process was killed" if isinstance(error, BrokenProcessPool) else str(error)
        print(f"out of memory, or nearly so: {why.splitlines()[0]}", file=sys.stderr)
        return 1
    except (RuntimeError, HoldfastError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    print(json.dumps(_slowest(measured)))
    return 0


def _threads(job: TrainingJob, workers: int) -> int:
    """Threads of each worker, as the agents of local nodes choose them."""
    cpu = job.spec.resources.cpu
    return max(1, int(cpu) if cpu is not None else cpus() // workers)


def _config(job: TrainingJob) -> Pretrain:
    config = pretraining(job.spec.entrypoint.recipe)
    if config is None:
        raise UserError("spec.entrypoint.recipe: got another recipe; expected pretrain")
    return config


# -- processes ----------------------------------------------------------------------------------
def _measure_in_processes(settings: Settings) -> list[dict[str, Any]]:
    """One worker measures in this process. Raises what the first one that failed has raised."""
    if settings.workers == 1:
        return [_worker(settings, 0)]
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    settings = settings._replace(port=store.port)
    # spawn: a process with torch's threads must not fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(settings.workers, mp_context=context) as pool:
        running: list[Future[dict[str, Any]]] = [
            pool.submit(_worker, settings, rank) for rank in range(settings.workers)
        ]
        return [future.result() for future in as_completed(running)]


def _worker(settings: Settings, rank: int) -> dict[str, Any]:
    """One worker; joins the group of the others if there are any."""
    torch.set_num_threads(settings.threads)
    job = load_job(settings.file)
    on_gpu = torch.cuda.is_available() and job.spec.resources.gpu != 0
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    alone = settings.workers == 1
    if not alone:
        store = TCPStore(LOOPBACK, settings.port, is_master=False)
        wait = timedelta(seconds=GROUP_TIMEOUT_S)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=settings.workers, timeout=wait
        )
    try:
        measured = measure(job, settings, device)
        if not alone and not on_gpu:
            measured |= time_link(settings.workers, settings.steps)
        return measured
    finally:  # also ends the waiting of the others if this one failed
        if not alone:
            distributed.destroy_process_group()


def _slowest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest time of each part, and the narrowest link."""
    joined = dict(found[0])
    for result in found[1:]:
        for name, value in result.items():
            if value is not None:
                joined[name] = (min if name == "link_bandwidth" else max)(joined[name], value)
    return joined


# -- measurements -------------------------------------------------------------------------------
def measure(job: TrainingJob, settings: Settings, device: torch.device) -> dict[str, Any]:
    """{block_s, head_s, optimizer_s, parameters} of one worker; raises torch.OutOfMemoryError, or
    RuntimeError where main memory does not suffice."""
    config = _config(job)
    checkpointing = job.spec.parallelism.activation_checkpointing
    num_blocks = checkpointing.blocks.every_nth_block if checkpointing.blocks else 1
    if device.type == "cpu":
        num_blocks *= -(-min(BLOCKS_ON_CPU, config.model.num_layers) // num_blocks)
    model = Transformer(config.model.model_copy(update={"num_layers": num_blocks})).to(device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    dtype = parameter_dtype(job.spec.parallelism.precision, device)
    if settings.sharded:
        model.to(dtype)
    shape = (settings.micro_batch, config.data.sequence_length)
    tokens_bt = torch.randint(config.model.vocab_size, shape, device=device)
    inputs = _inputs_of_blocks(model, tokens_bt)  # in float32 where autocast casts, as in a step
    optimizer_s, parameters = _optimizer(config, model, device, settings.steps)
    if job.spec.parallelism.precision.linear == "float8":
        float8.expect_device(device)
        float8.convert(list(model.blocks), float8.recipe_of(device))
    blocks = checkpoint_blocks(model, list(model.blocks), checkpointing)
    if config.compile:
        for block in blocks:
            block.compile()
    x_btd = inputs[0].detach().requires_grad_()
    slope_btd = torch.ones_like(x_btd)

    def train_blocks() -> None:
        with autocast(dtype, device, settings.sharded):
            out_btd = x_btd
            for block in blocks:
                out_btd = block(out_btd, *inputs[1:])
        out_btd.backward(slope_btd.to(out_btd.dtype))  # type: ignore[no-untyped-call]
        _forget(model, x_btd)

    def train_head() -> None:
        with autocast(dtype, device, settings.sharded):
            loss = _loss(model, config, x_btd, tokens_bt)
        loss.backward()  # type: ignore[no-untyped-call]
        _forget(model, x_btd)

    return {
        "block_s": _median(train_blocks, settings.steps, device) / num_blocks,
        "head_s": _median(train_head, settings.steps, device),
        "optimizer_s": optimizer_s,
        "parameters": parameters,
    }


def _inputs_of_blocks(model: Transformer, tokens_bt: Tensor) -> tuple[Tensor, ...]:
    """Inputs of the model's first block: (B, T, D), and the rotations."""
    seen: list[tuple[Tensor, ...]] = []
    first: Block = model.blocks[0]  # type: ignore[assignment]
    handle = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    with torch.no_grad():
        model(tokens_bt[:1])
        handle.remove()
        assert model.embedding is not None
        return (model.embedding(tokens_bt), *seen[0][1:])


def _loss(model: Transformer, config: Pretrain, x_btd: Tensor, targets_bt: Tensor) -> Tensor:
    """The loss as the recipe's trainer computes it."""
    assert model.norm is not None and model.head is not None
    size, z_loss = config.loss.chunk_tokens, config.loss.z_loss
    if size:
        losses: Tensor = model.head(model.norm(x_btd), targets_bt, size, z_loss)
    else:
        logits = model.head(model.norm(x_btd))
        losses = token_losses(logits.flatten(0, 1), targets_bt.flatten(), z_loss)
    return losses.mean()


def _forget(model: nn.Module, x_btd: Tensor) -> None:
    x_btd.grad = None
    model.zero_grad()


def _optimizer(
    config: Pretrain, model: Transformer, device: torch.device, steps: int
) -> tuple[float | None, int]:
    """(median seconds of a step over the float32 parameters of the blocks, their number). None for
    optimizers whose time is not one of passes over memory."""
    shapes = {name: p.shape for name, p in model.named_parameters() if "blocks." in name}
    number = sum(shape.numel() for shape in shapes.values())
    if config.optimizer.chosen not in ("adamw", "adamw8bit"):
        return None, number
    parameters = {
        name: nn.Parameter(torch.zeros(shape, device=device)) for name, shape in shapes.items()
    }
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = make_optimizer(config.optimizer, parameters)
    return _median(optimizer.step, steps, device), number


def _median(run: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Seconds of one run. Those of a GPU are queued without waiting, as in a step."""
    for _ in range(WARM_UP):
        run()
    if device.type != "cuda":
        _meet()
        return statistics.median(timeit.repeat(run, repeat=steps, number=1))
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(steps + 1)
    ]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    between: list[float] = [
        event.elapsed_time(later) for event, later in itertools.pairwise(events)
    ]
    return statistics.median(between) / 1e3


def _meet() -> None:
    """All processes begin a measurement together."""
    if distributed.is_initialized():
        distributed.barrier()


def time_link(workers: int, steps: int) -> dict[str, Any]:
    """{link_latency_s, link_bandwidth} of a ring, from all-reduces of two sizes: each of the
    2 (n - 1) steps of a ring takes latency + bytes / n / bandwidth (Hockney 1994)."""
    medians = []
    for num_bytes in MESSAGES:
        values = torch.zeros(num_bytes // 4)
        _meet()

        def reduce(values: Tensor = values) -> None:
            distributed.all_reduce(values)

        medians.append(_median(reduce, steps, torch.device("cpu")))
    return link_of(medians, workers)


def link_of(seconds: list[float], workers: int) -> dict[str, Any]:
    """The line through two (bytes that a rank sends, seconds)."""
    hops = 2 * (workers - 1)
    sent = [hops / workers * num_bytes for num_bytes in MESSAGES]
    # On a busy machine the small message may take as long as the large one.
    slope = max(seconds[1] - seconds[0], 0.1 * seconds[1]) / (sent[1] - sent[0])
    latency = max(0.0, seconds[0] - slope * sent[0]) / hops
    return {"link_latency_s": latency, "link_bandwidth": 1 / slope}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

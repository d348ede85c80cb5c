"""Process groups that a survivor forms again in its process, with NCCL on one GPU.

Two ranks share the GPU. Rank 1 is killed while rank 0 waits for it in a collective; another thread
of rank 0 then aborts the group, which revokes its communicator. Rank 0 forms the group alone, and
again with a new rank 1. Source: abort and reconfigure of nccl2 in torch/csrc/distributed/c10d.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.contestants.base import ROOT
from holdfast.workers.session.groups import SwitchStore, why_not_formed

from . import faults
from .check import shared_backend
from .kit import Figures, Kit, Skip
from .sharing import ASKED, share_one_gpu

WAITS_S = 0.5
"""Seconds that rank 0 waits in the collective before its peer is killed."""
LIMIT = timedelta(seconds=60)
SIZE = 2**20


def regroup(kit: Kit) -> Figures:
    """Seconds until rank 0 is free and has groups again, and what torch and CUDA say meanwhile."""
    if why := why_not_formed():
        raise Skip(why)
    if not kit.rehearse and shared_backend(kit) != "nccl":
        raise Skip("NCCL does not let two ranks share this GPU")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    rounds = ["forward", "backward", *kit.size(["forward", "backward", "sticky"], [])]

    def start(rank: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "bench.gpu.regroup", str(rank), str(store.port), kit.device]
        environment = os.environ | {ASKED: "nccl", "RANK": str(rank)}
        return subprocess.Popen([*words, *rounds], cwd=ROOT, env=environment)

    survivor, peer = start(0), start(1)
    for number, name in enumerate(rounds):
        store.wait([f"waits/{number}"], LIMIT)
        if name == "sticky":
            break
        time.sleep(WAITS_S)
        peer.kill()
        peer.wait()
        store.set(f"dead/{number}", "")
        store.wait([f"alone/{number}"], LIMIT)
        peer = start(1)
    figures = json.loads(store.get("figures"))
    assert [survivor.wait(30), peer.wait(30)] == [0, 0]
    return {**figures, **json.loads(store.get("sticky"))}


class Rank:
    """One of the two processes."""

    def __init__(self, rank: int, store: dist.Store, device: str) -> None:
        self.rank, self.store, self.device = rank, store, torch.device(device)
        self.number = int(store.add(f"starts/{rank}", 1)) - 1
        """Rounds before its own."""
        kind = "nccl" if device == "cuda" else "gloo"
        self.switch = SwitchStore(store)  # torch alone does not keep an object of Python alive
        dist.init_process_group(
            kind, store=self.switch, rank=rank, world_size=2, enable_reconfigure=True, timeout=LIMIT
        )
        self.backend: Any = dist.group.WORLD._get_backend(self.device)  # type: ignore[union-attr]
        self.values = torch.ones(SIZE, device=self.device)

    def form(self, name: str, members: Sequence[int]) -> float:
        """Seconds until the group has these members; the sum of ones shows that it works."""
        from torch._C import _distributed_c10d as native

        self.store.set(f"{name}/{self.rank}", self.backend.get_reconfigure_handle())
        handles = [self.store.get(f"{name}/{member}").decode() for member in members]
        began, options = time.perf_counter(), native.ReconfigureOptions()
        options.handles, options.timeout = handles, LIMIT
        options.uuid = 10 * self.number + len(members)
        self.backend.reconfigure(options).wait()
        self.values.fill_(1)
        assert self.reduced() == len(members), "the sum is wrong"
        return time.perf_counter() - began

    def reduced(self) -> float:
        dist.all_reduce(self.values)
        return float(self.values[0])  # waits for the device

    def forward(self) -> None:
        self.reduced()

    def backward(self) -> None:
        outputs = 2 * torch.ones(8, device=self.device, requires_grad=True)
        outputs.register_hook(lambda gradient: gradient * self.reduced())
        outputs.sum().backward()  # on a GPU, in a thread of autograd

    def cut(self, at: dict[str, float]) -> None:
        """Abort the group, as the pulse thread would, once the peer is dead."""
        self.store.wait([f"dead/{self.number}"], LIMIT)
        at["cut"] = time.perf_counter()
        if self.device.type == "cuda":  # gloo loses the only connection by itself
            self.backend.abort()
        at["aborted"] = time.perf_counter()


def said(action: Callable[[], object]) -> str:
    """First line of an action's error."""
    try:
        action()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return "no error"


def survive(here: Rank, rounds: Sequence[str]) -> Figures:
    figures: Figures = {}
    free_bytes = []
    for number, name in enumerate(rounds):
        here.number = number
        joined_s = here.form(f"both/{number}", (0, 1))
        if here.device.type == "cuda":
            free_bytes.append(torch.cuda.mem_get_info()[0])
        if number:
            figures[f"new rank joins, {number}_s"] = joined_s
        here.store.set(f"waits/{number}", "")
        if name == "sticky":
            break
        at: dict[str, float] = {}
        cutter = threading.Thread(target=here.cut, args=(at,))
        cutter.start()
        label = f"{name}, {number}"
        figures[f"{label}: error"] = said(getattr(here, name))
        free = time.perf_counter()
        cutter.join()
        figures[f"{label}: free after abort_s"] = free - at["cut"]  # below 0: NCCL saw it first
        figures[f"{label}: abort_s"] = at["aborted"] - at["cut"]
        figures[f"{label}: next collective"] = said(here.reduced)
        if here.device.type == "cuda":
            figures[f"{label}: synchronize"] = said(torch.cuda.synchronize)
        figures[f"{label}: alone_s"] = here.form(f"alone/{number}/group", (0,))
        here.store.set(f"alone/{number}", "")
    here.number = len(rounds)
    if rounds[-1] != "sticky":
        figures["new rank joins, last_s"] = here.form(f"both/{here.number}", (0, 1))
    if free_bytes:
        figures["device bytes lost in all rounds"] = free_bytes[0] - free_bytes[-1]
    return figures


def break_context(here: Rank) -> Figures:
    """An illegal access, and whether the process can form a group after it."""
    figures = {"sticky error": said(lambda: faults.FAULTS["access"](here.device))}
    figures["sticky error: abort"] = said(here.backend.abort)
    return figures | {"sticky error: form": said(lambda: here.form("sticky", (1,)))}


def main(words: list[str]) -> None:
    rank, port, device, rounds = int(words[0]), int(words[1]), words[2], words[3:]
    if device == "cuda":
        share_one_gpu()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    here = Rank(rank, store, device)
    if rank == 0:
        store.set("figures", json.dumps(survive(here, rounds)))
        return
    here.form(f"both/{here.number}", (0, 1))
    is_last = here.number == len(rounds) - (rounds[-1] == "sticky")
    if not is_last:
        time.sleep(LIMIT.total_seconds())  # it is killed
    store.set("sticky", json.dumps(break_context(here) if rounds[-1] == "sticky" else {}))


if __name__ == "__main__":
    main(sys.argv[1:])

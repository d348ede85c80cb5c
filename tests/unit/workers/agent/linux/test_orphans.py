"""Processes that a killed one leaves behind are ended, after its shared memory was removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RIG = """
import os, signal, subprocess, sys, time
from holdfast.workers.agent.linux import orphans, processes

processes.adopt_orphans()
reads, writes = os.pipe()
worker = os.fork()
if worker == 0:
    os.setsid()
    from multiprocessing import resource_tracker, shared_memory
{worker}
    signal.pause()
name, pids = os.read(reads, 1000).decode().split(":")
os.kill(worker, signal.SIGKILL)
os.waitpid(worker, 0)
adopted = orphans.Orphans(lambda child: False)
programs = adopted.end()
adopted.wait()
left = [pid for pid in pids.split() if processes.state_of(int(pid))]
print(name, os.path.exists("/dev/shm/" + name), left, *programs, sep=";")
"""


def kill(worker: str) -> list[str]:
    """(name, whether it is there, processes that are left, programs) after a worker was killed."""
    lines = "".join(f"    {line}\n" for line in worker.splitlines())
    command = [sys.executable, "-c", RIG.format(worker=lines)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=True)
    return done.stdout.strip().split(";")


def test_shared_memory_of_a_killed_worker_is_removed_and_what_it_started_is_killed() -> None:
    worker = """memory = shared_memory.SharedMemory(create=True, size=100)
other = subprocess.Popen(["setsid", "sleep", "1000"])
child = os.fork()  # as a process of a DataLoader, it holds the pipe of the tracker
if child == 0:
    signal.pause()
tracker = resource_tracker._resource_tracker._pid
while b"resource_tracker" not in open(f"/proc/{tracker}/cmdline", "rb").read():
    time.sleep(0.01)  # it has not begun
while not open(f"/proc/{other.pid}/cmdline", "rb").read().startswith(b"sleep"):
    time.sleep(0.01)
os.write(writes, f"{memory.name}:{child} {tracker} {other.pid}".encode())"""
    name, there, left, *programs = kill(worker)
    assert name.startswith("psm_") and (there, left) == ("False", "[]")
    assert programs == ["sleep 1000"]


def test_what_cleans_up_is_killed_when_it_hangs() -> None:
    worker = """tracker = subprocess.Popen([sys.executable, "-c",
    "import os, time; os.close(0); os.write(1, b'1'); time.sleep(1000)", "resource_tracker"],
    stdout=subprocess.PIPE)
tracker.stdout.read(1)
os.write(writes, f"none:{tracker.pid}".encode())"""
    assert kill(worker) == ["none", "False", "[]"]


def test_the_package_that_is_looked_for_is_that_of_this_python() -> None:
    import multiprocessing.resource_tracker

    import torch

    assert Path(multiprocessing.resource_tracker.__file__).name == "resource_tracker.py"
    assert (Path(torch.__file__).parent / "bin" / "torch_shm_manager").is_file()

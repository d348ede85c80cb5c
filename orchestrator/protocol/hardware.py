"""Queries the hardware of this machine without opening a device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from msgspec import structs

from . import cgroup
from .facts import Gpu, Processor

NVIDIA_SMI_TIMEOUT_S = 10.0
_FORMAT = "--format=csv,noheader,nounits"
INSTRUCTIONS = ("fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Flags of /proc/cpuinfo that decide how fast a core multiplies matrices."""
_MIG = re.compile(r"MIG (\S*?\.(\d+)gb\S*)\s.*\(UUID: (MIG-[^)\s]+)\)")


def query_gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists; it comes with the driver, and importing torch to ask takes
    seconds. Empty without nvidia-smi. Raises OSError or subprocess.SubprocessError if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    lines = _run(program, "--query-gpu=name,memory.total,mig.mode.current", _FORMAT)
    gpus, divided = [], []
    for index, line in enumerate(lines):
        name, memory, mig = (*(part.strip() for part in line.split(",")), "", "")[:3]
        if memory.isdigit():
            gpus.append(Gpu(name, int(memory) * 2**20))
            divided.append(index if mig == "Enabled" else -1)
    if not gpus or -1 in divided:
        # CUDA shows either whole GPUs or one part to a process.
        whole = [index for index, at in enumerate(divided) if at < 0]
        if len(whole) == len(gpus):
            return tuple(gpus)
        return tuple(structs.replace(gpus[index], device=str(index)) for index in whole)
    return mig_devices("\n".join(_run(program, "-L")))


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The processor of this machine; a usual one where the kernel does not show it."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        return Processor()
    names = set(fields.get("flags", "").split())
    flags = tuple(flag for flag in INSTRUCTIONS if flag in names) if names else Processor().flags
    return Processor(fields.get("model name", "CPU"), flags)


def cpus() -> int:
    """Cores that this process may use at once, whole ones of a CPU quota."""
    quota = cgroup.cpu_limit(cgroup.find("cpu"))
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


def memory_bytes() -> int:
    """Main memory that this process may use: of the machine, or less by a limit of its groups."""
    limit = cgroup.memory_limit_bytes(cgroup.find("memory"))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total if limit is None else min(total, limit)


def mig_devices(listed: str) -> tuple[Gpu, ...]:
    """The parts of GPUs in the output of `nvidia-smi -L`. Their memory is in their profile: 3g.20gb
    has 20 GB."""
    gpus = []
    for profile, gigabytes, uuid in _MIG.findall(listed):
        gpus.append(Gpu(f"MIG {profile}", int(gigabytes) * 10**9, uuid))
    return tuple(gpus)


def _run(program: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=NVIDIA_SMI_TIMEOUT_S,
        check=True,
    )
    return done.stdout.splitlines()


def rdma_devices() -> tuple[str, ...]:
    """RDMA devices as `name:link layer`; the link layer distinguishes InfiniBand, RoCE and EFA."""
    root = Path("/sys/class/infiniband")
    devices = []
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            layer = (device / "ports/1/link_layer").read_text().strip()
        except OSError:
            layer = ""
        devices.append(f"{device.name}:{layer}" if layer else device.name)
    return tuple(devices)

"""Runs py-spy, which reads the memory of another process and never pauses it (--nonblocking)."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
REFUSED = ("permission denied", "operation not permitted", "os error 1)", "os error 13)")


class SpyError(Exception):
    """py-spy gave no result; the text says why and what to do."""


async def run(*arguments: str, timeout_s: float) -> bytes:
    """py-spy's standard output. Raises SpyError."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        raise SpyError("py-spy is not installed beside this Python; pip install py-spy")
    try:
        spy = await asyncio.create_subprocess_exec(
            tool, *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise SpyError(f"py-spy could not be started: {error}") from None
    try:
        async with asyncio.timeout(timeout_s):
            out, errors = await spy.communicate()
    except TimeoutError:
        raise SpyError(f"py-spy gave no result within {timeout_s:g} s") from None
    finally:
        if spy.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                spy.kill()
            await spy.wait()
    if spy.returncode != 0:
        raise SpyError(explained(errors.decode(errors="replace")))
    return out


def explained(errors: str) -> str:
    """Explanation of py-spy's failure, with the fix where the kernel rejects ptrace."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if not any(word in errors.lower() for word in REFUSED):
        return f"py-spy: {lines[-1] if lines else 'it failed without a message'}"
    try:
        scope = YAMA.read_text(encoding="ascii").strip()
    except OSError:
        scope = "0"
    text = "the kernel does not allow py-spy to read another process (ptrace)"
    if scope in ("2", "3"):
        fix = "1 or 0" if scope == "2" else "1 or 0 at the next boot: 3 cannot be undone before"
        return f"{text}: kernel.yama.ptrace_scope is {scope}; set it to {fix}"
    return (
        f"{text}; in a container, allow ptrace and process_vm_readv in its seccomp profile, or add "
        f"the capability SYS_PTRACE (docker: --cap-add SYS_PTRACE; Kubernetes: securityContext of "
        f"the container `worker` in spec.kubernetes.podTemplate)"
    )

"""The uploaded code of a job on one node: fetched from the controller, checked, unpacked.

Workers run in the unpacked directory. Each archive has one of its own, below a directory that only
this agent uses; that of the code before stays until the next one comes, for workers that still end.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol import code_archive
from holdfast.orchestrator.protocol import messages as m

FETCH_S = 120.0
"""Limit for a whole archive. The controller gives a launch up earlier, and then launches again."""
REPEAT_S = 5.0
"""A part that has not come by then is requested again: the connection may have been lost."""
MAX_PARTS = -(-limits.MAX_CODE_ARCHIVE_BYTES // limits.CODE_PART_BYTES)


class CodeUnavailable(HoldfastError):
    """The workers cannot start: their code cannot be fetched or unpacked."""


class UploadedCode:
    """The uploaded code of one node. `send` gives a message to the controller; nothing is sent
    while there is no connection."""

    def __init__(self, send: Callable[[m.FetchCode], None], repeat_s: float = REPEAT_S) -> None:
        self._send, self._repeat_s = send, repeat_s
        self._place: Path | None = None
        self._ready: dict[str, Path] = {}
        """Archive -> its directory; the newest comes last."""
        self._fetching = asyncio.Lock()
        self._expected: tuple[str, int] = ("", 0)
        self._arrived: asyncio.Future[m.CodePart] | None = None

    async def directory(self, code: str) -> str:
        """Directory of the files of an archive, once they are there. Raises CodeUnavailable."""
        async with self._fetching:
            if code not in self._ready:
                try:
                    async with asyncio.timeout(FETCH_S):
                        archive = await self._fetch(code)
                    self._ready[code] = await asyncio.to_thread(self._unpack, code, archive)
                except TimeoutError:
                    text = f"code {code[:12]}: the controller has not sent it in {FETCH_S:g} s"
                    raise CodeUnavailable(text) from None
                except OSError as error:
                    raise CodeUnavailable(
                        f"code {code[:12]}: cannot be unpacked: {error}"
                    ) from None
                except code_archive.BadArchive as error:
                    raise CodeUnavailable(str(error)) from None
                for old in list(self._ready)[:-2]:
                    await asyncio.to_thread(shutil.rmtree, self._ready.pop(old), True)
            else:
                self._ready[code] = self._ready.pop(code)
            return str(self._ready[code])

    def received(self, part: m.CodePart) -> None:
        """A part that nothing waits for is dropped."""
        waiting = self._arrived
        if waiting is not None and not waiting.done() and (part.code, part.part) == self._expected:
            waiting.set_result(part)

    def close(self) -> None:
        """Delete all of it: no worker runs any more."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    async def _fetch(self, code: str) -> bytes:
        parts: list[bytes] = []
        num_parts = 1
        while len(parts) < num_parts:
            part = await self._part(code, len(parts))
            if part.problem:
                raise CodeUnavailable(part.problem)
            num_parts = part.num_parts
            if not 0 < num_parts <= MAX_PARTS or len(part.data) > limits.CODE_PART_BYTES:
                raise CodeUnavailable(f"code {code[:12]}: more than {MAX_PARTS} parts, or too long")
            parts.append(part.data)
        return b"".join(parts)

    async def _part(self, code: str, number: int) -> m.CodePart:
        self._expected = (code, number)
        self._arrived = asyncio.get_running_loop().create_future()
        while True:
            self._send(m.FetchCode(code=code, part=number))
            try:
                async with asyncio.timeout(self._repeat_s):
                    return await asyncio.shield(self._arrived)
            except TimeoutError:
                continue

    def _unpack(self, code: str, archive: bytes) -> Path:
        """Runs in a thread."""
        if self._place is None:
            self._place = Path(tempfile.mkdtemp(prefix="holdfast-code-"))
        target = self._place / code[:16]
        shutil.rmtree(target, ignore_errors=True)  # of an attempt that was cut short
        target.mkdir()
        code_archive.unpack(code, archive, target)
        return target

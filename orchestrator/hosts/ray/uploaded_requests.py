"""Requests of commands over http://. A command uploads its request through the dashboard, as a Ray
job's files are uploaded, and reads the answer among Ray's logs of the head: it needs no Ray job of
its own.

The answer is encrypted with a key from the request: logs are shown and collected, and a journal has
the variables of spec.env. A request is carried out once: it is deleted from the cluster's store
before, and a command sends it again, with the same id, only while there is no answer file, which
says first that it was taken.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from cryptography.fernet import Fernet

from holdfast.orchestrator import limits
from holdfast.orchestrator.backends.ray import names
from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.core.journal import JournalError, encode_record

from . import gcs_journal
from .code_store import KeyValueCodeStore

JOURNAL = "journal"
"""The verb that is answered with the job's journal."""
AGAIN = "again"
"""The verb before which the new code is uploaded."""
ANSWER_KEPT_S = 120.0 + limits.MAX_PROFILE_S + 2 * limits.TRACE_STEP_S
"""Longer than a command waits for it."""

Perform = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]

log = logging.getLogger("holdfast")


class UploadedRequest(msgspec.Struct, frozen=True):
    id: str
    key: str
    """Of Fernet, for the answer."""
    verb: str
    arguments: dict[str, Any]

    def seal(self, answer: dict[str, Any] | None) -> bytes:
        """The content of the answer file; None: the request was taken."""
        return Fernet(self.key).encrypt(json.dumps(answer).encode())

    def unseal(self, content: bytes) -> dict[str, Any] | None:
        """Raises InvalidToken for what is no answer to this request."""
        answer: dict[str, Any] | None = json.loads(Fernet(self.key).decrypt(content))
        return answer


class UploadedRequests:
    """Of one job."""

    def __init__(
        self, store: JobKeyValueStore, job_id: str, logs: Path, job: str, perform: Perform
    ) -> None:
        """`logs`: Ray's log directory on this machine."""
        self._store, self._name, self._job_id = store, names.request(job_id), job_id
        self._logs, self._job, self._perform = logs, job, perform
        self._taken: dict[str, float] = {}
        """Id -> when it was taken."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, period_s: float) -> None:
        """Until it is cancelled."""
        while True:
            try:
                data = await asyncio.to_thread(self._store.take_upload, self._name)
            except Exception as error:  # Ray's own: the head does not answer
                log.debug("requests over http:// wait: %s", error)
                data = None
            if data:
                task = asyncio.get_running_loop().create_task(self._take(data))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._forget()
            await asyncio.sleep(period_s)

    async def _take(self, data: bytes) -> None:
        try:
            request = msgspec.json.decode(data, type=UploadedRequest)
            file = self._logs / names.answer_file(self._job, request.id)
        except ValueError as error:
            log.warning("an uploaded request is not read: %s", error)
            return
        if request.id in self._taken:
            return
        self._taken[request.id] = time.monotonic()
        try:
            _write(file, request.seal(None))
            if request.verb == JOURNAL:
                answer = await asyncio.to_thread(self._journal)
            elif request.verb == AGAIN:
                answer = await self._again(request.arguments)
            else:
                answer = await self._perform(request.verb, request.arguments)
            _write(file, request.seal(answer))
        # A full disk, no key, Ray's own: the command reports that there was no answer.
        except Exception as error:
            log.warning("a request over http:// is not answered: %s", error)

    async def _again(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Ray may delete an uploaded file: the code goes into the job's record first."""
        code = str(arguments.get("code"))
        name = names.uploaded_code(self._job_id, code)
        archive = await asyncio.to_thread(self._store.take_upload, name)
        if archive is None:
            return {"ok": False, "detail": f"code {code[:12]} was not uploaded", "body": {}}
        codes = KeyValueCodeStore(self._store)
        await asyncio.to_thread(codes.upload, code, archive)
        answer = await self._perform(AGAIN, arguments)
        if answer["ok"]:
            before = str(answer["body"].get("before", ""))
            await asyncio.to_thread(codes.delete_others, code, before)
        return answer

    def _journal(self) -> dict[str, Any]:
        try:
            chunks = gcs_journal.read(self._store, self._job, history=True)
        except JournalError as error:
            return {"ok": False, "detail": str(error), "body": {}}
        return {"ok": True, "detail": "", "body": {"chunks": [_encoded(one) for one in chunks]}}

    def _forget(self) -> None:
        """Delete old answers."""
        now_s = time.monotonic()
        for key in [key for key, at_s in self._taken.items() if now_s - at_s > ANSWER_KEPT_S]:
            del self._taken[key]
            with suppress(OSError):
                (self._logs / names.answer_file(self._job, key)).unlink(missing_ok=True)


def _write(file: Path, content: bytes) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(content)
    part.replace(file)


def _encoded(chunk: gcs_journal.Chunk) -> dict[str, Any]:
    data = b"".join(encode_record(one.now_ns, one.event) for one in chunk.records)
    return {
        "covered": chunk.covered,
        "snapshot": None if chunk.snapshot is None else base64.b64encode(chunk.snapshot).decode(),
        "records": base64.b64encode(data).decode(),
    }

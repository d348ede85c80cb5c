"""One TensorBoard run for all starts of a job: transformers and Lightning choose a new directory in
each process, and here get that of the job's first start.

A directory that the script or the user has chosen stays. Outside Holdfast nothing changes. Nothing
of a framework is imported here.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import wraps
from pathlib import PurePath
from typing import Any

from holdfast.orchestrator.protocol.environment import JOB_ID
from holdfast.workers import worker_transport

writers: list[Any] = []
"""The SummaryWriter of transformers in this process, once it trains."""
_num_loggers: Counter[str] = Counter()
"""Place -> loggers of this process that were given a directory there. The second one of each start
continues the run of the second one of the first start."""


def one_run_of_transformers(callback_class: Any) -> None:
    """Has this class, transformers' TensorBoardCallback, log below `runs` in the trainer's output
    directory as it does, but to a directory with the name of the job."""
    inner = callback_class.on_train_begin
    if getattr(inner, "continues_one_run", False):
        return

    @wraps(inner)
    def on_train_begin(self: Any, args: Any, state: Any, *rest: Any, **more: Any) -> Any:
        job_id = _job_id()
        chosen = self.logging_dir is not None or self.tb_writer is not None
        if job_id and state.is_world_process_zero and not (chosen or state.is_hyper_param_search):
            assert worker_transport.attached is not None
            name = f"{worker_transport.attached.job.name}-{job_id}"
            number = _next_number(args.output_dir)
            place = PurePath(args.output_dir, "runs", name if number == 1 else f"{name}-{number}")
            self.logging_dir = str(place)
        found = inner(self, args, state, *rest, **more)
        writers[:] = [self.tb_writer] if self.tb_writer is not None else []
        return found

    on_train_begin.continues_one_run = True  # type: ignore[attr-defined]
    callback_class.on_train_begin = on_train_begin


def one_run_of_lightning(logger_class: Any) -> None:
    """Has this class, Lightning's TensorBoardLogger, take the `version_N` of the job's first start.
    A file beside these directories has the numbers, a line for each logger of the script."""
    inner = logger_class._get_next_version
    if getattr(inner, "continues_one_run", False):
        return

    @wraps(inner)
    def _get_next_version(self: Any) -> int:
        job_id = _job_id()
        if not job_id:
            return int(inner(self))
        files, root = self._fs, str(self.root_dir)
        number, record = _next_number(root), f"{root}/.holdfast-{job_id}"
        text = files.cat_file(record).decode() if files.exists(record) else ""
        known = [int(line) for line in text.splitlines() if line.isdecimal()]
        if number <= len(known):
            return known[number - 1]
        version = max(int(inner(self)), *(one + 1 for one in known), 0)
        files.makedirs(root, exist_ok=True)
        files.pipe_file(record, "".join(f"{one}\n" for one in [*known, version]).encode())
        return version

    _get_next_version.continues_one_run = True  # type: ignore[attr-defined]
    logger_class._get_next_version = _get_next_version


def _next_number(place: str) -> int:
    key = os.path.abspath(place) if "://" not in place else place  # noqa: PTH100
    _num_loggers[key] += 1
    return _num_loggers[key]


def _job_id() -> str:
    """Empty outside Holdfast, and on ranks other than 0, which do not log."""
    ours = worker_transport.attached is not None and os.environ.get("RANK") == "0"
    return os.environ.get(JOB_ID, "") if ours else ""

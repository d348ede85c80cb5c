"""One job, for Python programs and notebooks."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, overload

from ..errors import HoldfastError
from ..runtime.observe.view import JobView
from .access import Access


class JobHandle:
    """A job by its name; `Client.submit` and `Client.job` make it. It holds no connection: every
    call looks at the job as it is now. Every method raises HoldfastError when the job or its target
    cannot be reached, and UserError for invalid requests; the text says why."""

    def __init__(self, access: Access, name: str) -> None:
        self._access, self._name = access, name

    @property
    def name(self) -> str:
        """The job's metadata.name."""
        return self._name

    def view(self) -> JobView:
        """Output of `holdfast status --json`: state, step, loss, nodes, workers, checkpoints,
        goodput, the ledger of where the time went, and what each incident cost. Times that end in
        `_ns` are nanoseconds since 1970, those in `_s` seconds."""
        return self._access.view(self.name)

    def wait(self, timeout_s: float | None = None) -> JobView:
        """Wait until the job has ended, however it ended; its last view. Raises TimeoutError after
        `timeout_s` seconds, and the job continues; also HoldfastError when nothing controls the job
        any more."""
        try:
            return self._access.wait(self.name, timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"job {self.name}: has not ended after {timeout_s:g} s; it continues"
            ) from None

    @overload
    def logs(
        self,
        rank: int | None = None,
        generation: int | None = None,
        *,
        follow: Literal[False] = False,
    ) -> list[str]: ...
    @overload
    def logs(
        self, rank: int | None = None, generation: int | None = None, *, follow: Literal[True]
    ) -> Iterator[str]: ...
    def logs(
        self, rank: int | None = None, generation: int | None = None, *, follow: bool = False
    ) -> list[str] | Iterator[str]:
        """The lines that the workers print, as `holdfast logs` prints them: of one rank, or of all,
        each line after its rank; of one generation, or of all that are kept. With `follow`, an
        iterator that gets each line when it is written, and ends with the job."""
        words = [] if rank is None else ["--rank", str(rank)]
        words += [] if generation is None else ["--generation", str(generation)]
        if follow:
            return self._access.lines("logs", self.name, "--follow", *words)
        return list(self._access.lines("logs", self.name, *words))

    def events(self) -> list[dict[str, Any]]:
        """Every event that is kept, and each decision with its reason, oldest first: what
        `holdfast debug events --json` prints."""
        lines = self._access.lines("debug", "events", self.name, "--json")
        return [json.loads(line) for line in lines]

    def resize(self, nodes: int) -> str:
        """Train on so many nodes from now on. A sentence: what happens."""
        return self._request("resize", str(nodes))

    def suspend(self) -> str:
        """Write a checkpoint, stop the workers and release the nodes until `resume`."""
        return self._request("suspend")

    def resume(self) -> str:
        """Continue a suspended job."""
        return self._request("resume")

    def cancel(self) -> str:
        """End the job permanently. Its record and its checkpoints stay."""
        return self._request("cancel")

    def delete(self, keep_checkpoints: str | Path | None = None) -> None:
        """Delete the record of a job that has ended, with its logs and the checkpoints in its
        directory; those are moved to the new directory `keep_checkpoints` first. On a cluster its
        checkpoints stay where they are."""
        keep = [] if keep_checkpoints is None else ["--keep-checkpoints", str(keep_checkpoints)]
        self._access.delete(self.name, keep)

    def _request(self, verb: str, *arguments: str) -> str:
        reply = json.loads(self._access.run(verb, self.name, *arguments, "--json"))
        return str(reply["detail"] or f"{verb} requested")

    def __repr__(self) -> str:
        return f"<job {self.name} on {self._access.what}>"

    def _repr_html_(self) -> str:
        """A table with one row, for a notebook."""
        try:
            view = self.view()
        except HoldfastError as error:
            return f"<pre>{html.escape(f'{self.name}: {error}')}</pre>"
        total = f" of {view.total_steps}" if view.total_steps else ""
        steps = f"{view.step + 1}{total}" if view.step >= 0 or total else "-"  # it reports none
        facts = {
            "job": self.name,
            "state": view.state,
            "steps": steps,
            "loss": "" if view.loss is None else f"{view.loss:.4f}",
            "workers": str(view.world_size or ""),
            "incidents": str(max(view.num_incidents, len(view.incidents))),
        }
        head = "".join(f"<th>{html.escape(name)}</th>" for name in facts)
        row = "".join(f"<td>{html.escape(text)}</td>" for text in facts.values())
        return f"<table><tr>{head}</tr><tr>{row}</tr></table>"

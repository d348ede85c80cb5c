"""Options and arguments that several commands share.

Owns: their names and help. Must not: import anything heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..runtime.home import JobDirectory
    from ..runtime.view import JobView

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="HOLDFAST_HOME",
        help="Directory that holds the jobs.",
        show_default="~/.holdfast",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's metadata.name.")]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A TrainingJob in YAML.", show_default=False)
]


def find_job(name: str, home: Path | None) -> JobDirectory:
    """The directory of an existing job. Raises UserError, naming the jobs that there are."""
    from ..runtime.home import Home

    return Home(home).find(name)


def read_view(directory: JobDirectory) -> JobView:
    """The job as its controller sees it now, or as its journal tells when there is none."""
    import msgspec

    from ..runtime.record import read_view as fold
    from ..runtime.view import JobView
    from .client import ControllerGone, ask

    try:
        body = ask(directory, "status").body
    except ControllerGone:
        view = fold(directory)
        view.controller_alive = False
        return view
    return msgspec.convert(body.get("view", body), JobView)

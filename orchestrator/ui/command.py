"""`holdfast ui`, and the page beside `holdfast run --ui`. Imported for `--help`: nothing heavy."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.orchestrator.cli.options import Target, with_target
from holdfast.orchestrator.cli.output import stderr
from holdfast.orchestrator.errors import HoldfastError, UserError

if TYPE_CHECKING:
    from holdfast.orchestrator.runtime.observe.view import JobView

HOST = "127.0.0.1"
COMMAND = "HOLDFAST_UI_COMMAND"
"""Descriptor of a pipe that the command beside the page holds open."""
FIX = "pip install '.[ui]' in a checkout of Holdfast"


def register(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(with_target(ui))


def ui(
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, help="Port on 127.0.0.1.", show_default="any free one"
        ),
    ] = 0,
    *,
    target: Target,
) -> None:
    """Open a page of all jobs: state, progress, where the time went, incidents, ranks, logs.

    This process serves the page on loopback only; its URL contains a random token. Clusters are
    read with your own credentials, and nothing is installed there. Ctrl-C ends the page.

    Examples: `holdfast ui`, `holdfast ui --kubernetes -n team`, `holdfast ui --ray ray://HEAD:10001`
    """
    import secrets
    import socket
    import threading

    try:
        import uvicorn

        from .app import make_app
        from .source import Source
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # a browser that opens the URL at once waits for the first answer
    except OSError as error:
        raise UserError.of("--port", f"{port} ({error.strerror})", "a free port") from None
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    where = target.command().removeprefix("holdfast").removeprefix("kubectl holdfast").strip()
    source = Source(target, where.replace("--", "") or "this machine")
    url = f"http://{HOST}:{port}/?token={token}"
    stderr().print(f"The page of your jobs: {url}", soft_wrap=True)
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
        import webbrowser

        webbrowser.open(url)
    config = uvicorn.Config(
        make_app(source, token, port), log_level="warning", access_log=False, lifespan="off",
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = uvicorn.Server(config)
    end = server.handle_exit

    def leave(*received: Any) -> None:
        source.closed = True  # an open page's stream ends by itself
        end(*received)

    server.handle_exit = leave  # type: ignore[assignment]
    if command := os.environ.get(COMMAND):

        def follow() -> None:
            os.read(int(command), 1)  # nothing is ever written
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=follow, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


@contextlib.contextmanager
def beside(target: Any) -> Iterator[None]:
    """The page in a process of its own. It ends with the context, and with the command however that
    ends: a supervised command continues in a child, which cannot wait for the page."""
    from holdfast.orchestrator.protocol import python_command

    environment = dict(os.environ)
    if home := getattr(target, "home", None):
        environment["HOLDFAST_HOME"] = str(home.path)
    options = target.command("ui").split()[1:]
    reader, writer = os.pipe()
    environment[COMMAND] = str(reader)
    page = subprocess.Popen(
        [*python_command.start("holdfast.orchestrator.cli.main"), *options],
        stdin=subprocess.DEVNULL, env=environment, start_new_session=True, pass_fds=(reader,),
    )  # fmt: skip
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        with contextlib.suppress(ProcessLookupError):
            os.kill(page.pid, signal.SIGTERM)


def write_report(view: JobView, file: str, command: str) -> None:
    """Raises UserError, and HoldfastError for a file that cannot be written."""
    from pathlib import Path

    try:
        from .pages import report_html
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    try:
        text = report_html(view, command)
        if file == "-":
            sys.stdout.write(text)
        else:
            Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise HoldfastError(f"--html: {file} cannot be written: {error.strerror}") from None


def _missing(error: ModuleNotFoundError) -> UserError:
    return UserError.of("ui", f"no package {error.name}", "it installed", FIX)

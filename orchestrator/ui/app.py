"""The web application of `holdfast ui`, for one person on this machine.

Every request needs the cookie that the URL with the token gave, and a Host of this machine; a
change is a POST whose Origin is this page's own. Scripts, styles and data come from here alone.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.orchestrator.errors import HoldfastError

from . import pages
from .source import Source

HOSTS = ("127.0.0.1", "localhost")
FILES = ("page.css", "page.js", "charts.js")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NO_TOKEN = "Open the URL that holdfast ui printed; it contains the token."
LIVE_S = 1.0
MAX_DIGITS = 5
"""A number of nodes has at most this many."""


class Entrance:
    """The check of who asks, and the headers that say what a browser may do with an answer."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token, self._cookie = app, token, f"holdfast-{port}"
        self._hosts = {f"{host}:{port}" for host in HOSTS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, guarded)

    def _answer(self, request: Request) -> Response | None:
        """An answer that needs no page; None: the request is served."""
        host = request.headers.get("host", "")
        if host not in self._hosts:
            return PlainTextResponse("Open this page as 127.0.0.1 or localhost.", 403)
        token = request.query_params.get("token")
        if token is not None and request.method == "GET" and self._is_token(token):
            entered = RedirectResponse(request.url.path, 303)
            entered.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return entered
        if not self._is_token(request.cookies.get(self._cookie, "")):
            return PlainTextResponse(NO_TOKEN, 403)
        if request.method == "POST" and request.headers.get("origin") != f"http://{host}":
            return PlainTextResponse("Rejected: changes must be sent from this page.", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def make_app(source: Source, token: str, port: int) -> Starlette:
    answers = Pages(source)
    return Starlette(
        routes=[
            Route("/", answers.all_jobs),
            Route("/live", answers.live),
            Route("/static/{file}", static),
            Route("/jobs/{name}", answers.one_job),
            Route("/jobs/{name}/live", answers.live),
            Route("/jobs/{name}/logs", answers.logs),
            Route("/jobs/{name}/events", answers.events),
            Route("/jobs/{name}/stacks", answers.stacks, methods=["POST"]),
            Route("/jobs/{name}/profile", answers.profile, methods=["POST"]),
            Route("/jobs/{name}/{verb}", answers.change, methods=["POST"]),
        ],
        middleware=[Middleware(Entrance, token=token, port=port)],
    )


async def static(request: Request) -> Response:
    file = request.path_params["file"]
    if file not in FILES:
        return PlainTextResponse("no such file", 404)
    return FileResponse(pages.STATIC / file)


class Pages:
    """The pages of one source, and the answers to their requests."""

    def __init__(self, source: Source) -> None:
        self._source = source

    async def all_jobs(self, request: Request) -> Response:
        reading = await self._source.read()
        if reading.problem and not reading.sections:
            return self._message("The jobs cannot be read", reading.problem, 502)
        jobs = reading.sections["jobs"]
        return self._page("list.html", live="/live", jobs=jobs)

    async def one_job(self, request: Request) -> Response:
        name = request.path_params["name"]
        reading = await self._source.read(name)
        view = reading.view
        if view is None or reading.problem:
            return self._message("This job cannot be read", reading.problem, 404)
        return self._page(
            "job.html", live=f"{request.url.path}/live", view=view, sections=reading.sections,
            names=pages.SECTIONS, verbs=pages.VERBS,
            failed=view.state == "failed",
        )  # fmt: skip

    def _page(self, template: str, **values: Any) -> Response:
        return HTMLResponse(pages.render_page(template, where=self._source.where, **values))

    def _message(self, title: str, text: str, status: int) -> Response:
        page = pages.render_page(
            "message.html", where=self._source.where, live="", title=title, text=text
        )
        return HTMLResponse(page, status)

    async def live(self, request: Request) -> Response:
        """Sections that have changed, as long as the page is open."""
        name = request.path_params.get("name", "")

        async def stream() -> AsyncIterator[str]:
            sent: dict[str, str] = {}
            problem: str | None = None
            state = ""
            while not self._source.closed:
                reading = await self._source.read(name)
                for key, html in reading.sections.items():
                    if sent.get(key) != html:
                        sent[key] = html
                        yield event("section", {"id": key, "html": html})
                if reading.view is not None and reading.view.state != state:
                    if state:
                        yield event("state", reading.view.state)
                    state = reading.view.state
                if reading.problem != problem:
                    problem = reading.problem
                    yield event("problem", problem) if problem else event("well", "")
                await asyncio.sleep(LIVE_S)

        return event_stream(stream())

    async def logs(self, request: Request) -> Response:
        query = request.query_params
        words = ["logs", request.path_params["name"]]
        follow = "follow" in query
        if "failed" in query and not follow:
            words.append("--failed")
        else:
            for name in ("rank", "generation"):
                if query.get(name, "").isdecimal():
                    words += [f"--{name}", query[name]]
        return self._lines(*words, *(["--follow"] if follow else []), follow=follow)

    async def events(self, request: Request) -> Response:
        return self._lines("debug", "events", request.path_params["name"])

    def _lines(self, *words: str, follow: bool = False) -> Response:
        async def stream() -> AsyncIterator[str]:
            async for batch in self._source.lines(*words, follow=follow):
                yield event("lines", batch)
            yield event("end", "")

        return event_stream(stream())

    async def change(self, request: Request) -> Response:
        verb, form = request.path_params["verb"], await fields(request)
        if verb not in pages.VERBS:
            return PlainTextResponse("no such request", 404)
        arguments = {}
        if verb == "resize":
            nodes = form.get("nodes", "")
            if not nodes.isdecimal() or len(nodes) > MAX_DIGITS:
                return PlainTextResponse("nodes: expected a number of nodes", 400)
            arguments["nodes"] = int(nodes)
        return await self._asked(
            request, verb, lambda reply: reply.detail or f"{verb} requested", **arguments
        )

    async def stacks(self, request: Request) -> Response:
        from holdfast.orchestrator.cli.commands.ranks import stack_lines

        def text(reply: Any) -> str:
            return "\n".join(stack_lines(reply.body)) or "no rank has answered"

        return await self._asked(request, "stacks", text, ranks=[], all=False)

    async def profile(self, request: Request) -> Response:
        form, name = await fields(request), request.path_params["name"]
        rank, seconds = (form.get(key, "") for key in ("rank", "seconds"))
        if not rank.isdecimal() or not seconds.isdecimal() or not 1 <= int(seconds) <= 60:
            return PlainTextResponse("rank and seconds: expected numbers, 60 s at most", 400)
        wanted = {"rank": int(rank), "seconds": float(seconds), "rate": 100, "idle": False}
        try:
            reply = await self._source.request(name, "profile", format="flamegraph", **wanted)
        except HoldfastError as error:
            return PlainTextResponse(str(error), 409)
        content = zlib.decompress(base64.b64decode(reply.body["content"]))
        place = {"Content-Disposition": f'attachment; filename="rank-{rank}.svg"'}
        return Response(content, media_type="image/svg+xml", headers=place)

    async def _asked(
        self, request: Request, verb: str, words: Callable[[Any], str], **arguments: Any
    ) -> Response:
        try:
            reply = await self._source.request(request.path_params["name"], verb, **arguments)
        except HoldfastError as error:
            return PlainTextResponse(str(error), 409)
        return PlainTextResponse(words(reply))


async def fields(request: Request) -> dict[str, str]:
    """A form's fields."""
    return dict(parse_qsl((await request.body()).decode(errors="replace")))


def event(kind: str, data: Any) -> str:
    """One server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def event_stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")

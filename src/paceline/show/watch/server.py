"""The HTTP server of the live page: on loopback only, and with a token for every request.

Every route and method needs the token, as `?token=T` or as the header `X-Paceline-Token`; a request
without it, with another Host or Origin, or with another method is refused before anything is read.
`run=NAME` selects one of several runs, by its name in `live.runs`; without it, the first.

    GET  /            the page; its scripts and styles are linked, none is inline
    GET  /assets/A    one of its scripts and styles, by its name in `find_assets`
    GET  /events      server-sent events, see below
    GET  /document    the document as JSON: what `event: document` sends
    GET  /report      the run as one HTML file, to be saved
    GET  /log?find=W  the newest lines of the output that contain W, as JSON
    POST /record      asks the run to record its next step (202; 409: the run is not running)

`event: document` is the document of `show.report.document.build`, with `live` as one more
section. It is sent first, and again when the run has news, at most once a second.
`event: live` is that section alone, up to four times a second. docs/watch.md has its fields.

A browser opens at most six connections to one address, so a page that is hidden closes its stream
and opens it again when it is shown. Messages are not queued: a slow page gets the newest.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError, WireError
from paceline.files import open_plain, replace_file
from paceline.group import find_peer_user
from paceline.show.report.page import SCRIPTS, STYLES, asset
from paceline.show.watch.follow import Followed, Watched

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol

    Handler = Callable[[Request], Awaitable[Response]]

TOKEN_BYTES = 32
TOKEN = re.compile(r"[A-Za-z0-9_-]{43,100}")
HOSTS = ("127.0.0.1", "localhost")
STREAMS_LIMIT = 128
"""The most open event streams."""
CONNECTIONS_LIMIT, STRANGERS_LIMIT, STRANGERS_PER_S = 256, 64, 100
"""The most open connections: in total, and of other users without the token; and how many of the
latter are accepted per second."""
QUEUE_LENGTH = 4096
"""How many connections may wait to be accepted, as far as the system allows."""
SEND_TIMEOUT_S = 30.0
"""A client that reads nothing for this long is disconnected."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def make_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def keep_token(path: Path) -> str:
    """The token in a file that only this user can read; a new one where there is no file."""
    try:
        with suppress(FileNotFoundError), open_plain(path) as file:
            is_private = not os.fstat(file.fileno()).st_mode & 0o077
            token = file.read(1000).decode(errors="replace").strip()
            if is_private and TOKEN.fullmatch(token):
                return token
            raise UsageError(
                f"{path} does not contain a token."
                if is_private
                else f"{path} can be read by others, and a token is a secret.",
                advice="Remove it, and a new one is made; or name another file.",
            )
        replace_file(path, [token := make_token(), "\n"])
    except (OSError, WireError) as error:
        why = error.strerror if isinstance(error, OSError) else error.what.rstrip(".")
        raise UsageError(
            f"The token cannot be kept in {path}: {why}.", advice="Name another file."
        ) from None
    return token


class Guard:
    """Refuses requests that do not come from our page, before they are parsed; adds headers."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self.known: set[Any] = set()
        """The addresses of connections that have shown the token."""
        self._hosts = {f"{host}:{port}".encode() for host in HOSTS}
        self._origins = {b"http://" + host for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await asyncio.wait_for(send(message), SEND_TIMEOUT_S)

        if scope["type"] == "http" and (refusal := self._refuse(scope)):
            status, why = refusal
            await send_safely({"type": "http.response.start", "status": status})
            await send_safely({"type": "http.response.body", "body": why.encode()})
        elif scope["type"] in ("http", "lifespan"):
            self.known.add(scope.get("client"))
            await self._app(scope, receive, send_safely if scope["type"] == "http" else send)

    def _refuse(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason of a request that is not answered."""
        from starlette.datastructures import Headers, QueryParams

        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        # A page of another site can reach this server through DNS that it controls, but not with
        # this Host header (DNS rebinding); with two headers it is unclear which one counts.
        given = [name for name in scope["headers"] if name[0] == b"host"]
        if len(given) != 1 or given[0][1].lower() not in self._hosts:
            return 421, "This server only answers requests for its own address."
        if (origin := headers.get("origin")) and origin.lower().encode() not in self._origins:
            return 403, "Requests from other pages are refused."
        token = headers.get("x-paceline-token") or query.get("token") or ""
        if not hmac.compare_digest(token.encode(errors="replace"), self._token):
            return 403, "The address lacks its token: open the one that `paceline watch` printed."
        if scope["method"] != ("POST" if scope["path"] == "/record" else "GET"):
            return 405, "This method is not allowed here."
        return None


class Listener(socket.socket):
    """Accepts connections, and closes those of other users when they come too fast.

    Closing is much cheaper than answering, so during a flood the owner's connections still find
    room in the kernel's queue at times, and memory does not grow.
    """

    _second = _strangers = 0

    def accept(self) -> tuple[socket.socket, Any]:
        for _ in range(CONNECTIONS_LIMIT):  # then let the event loop run other tasks
            connection, address = super().accept()
            if self._admits(connection):
                return connection, address
            connection.close()
        raise BlockingIOError

    def _admits(self, connection: socket.socket) -> bool:
        try:
            user = find_peer_user(connection)
        except OSError:  # the client has disconnected
            return False
        if user in (None, 0, os.geteuid()):
            return True
        second, before = int(time.monotonic()), self._second
        self._second, self._strangers = second, 1 + (self._strangers if second == before else 0)
        return user >= 0 and self._strangers <= STRANGERS_PER_S


def listen(port: int) -> Listener:
    """Listen on loopback only; port 0 means any free one."""
    listening = Listener()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(QUEUE_LENGTH)  # raises where another one listens, in spite of SO_REUSEADDR
    except (OSError, OverflowError) as error:
        listening.close()
        why = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UsageError(
            f"Port {port} of 127.0.0.1 cannot be used: {why}.",
            advice="Omit --port to use a free one.",
        ) from None
    return listening


def bound_connections(guard: Guard) -> type[H11Protocol]:
    """uvicorn's connections, limited in number. Beyond the limit the oldest without a token is
    closed, those of other users first: idle connections cannot lock the owner out."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    waiting: dict[Bounded, bool] = {}

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            with suppress(OSError):
                user = find_peer_user(transport.get_extra_info("socket"))
                waiting[self] = user not in (None, os.geteuid())
            for each in [each for each in waiting if each.client in guard.known]:
                del waiting[each]
            strangers = [each for each, is_strange in waiting.items() if is_strange]
            if len(strangers) > STRANGERS_LIMIT or len(self.connections) > CONNECTIONS_LIMIT:
                oldest = next(iter([*strangers, *waiting]), self)
                waiting.pop(oldest, None)
                oldest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            waiting.pop(self, None)
            guard.known.discard(self.client)

    return Bounded


def find_assets() -> Mapping[str, str]:
    """The files that the page links, by name; no others are ever sent."""
    return {
        "page.css": "\n".join([*map(asset, STYLES), asset("live.css", __package__)]),
        "page.js": "\n".join([*map(asset, SCRIPTS), asset("live.js", __package__)]),
    }


def render_page(name: str, token: str) -> str:
    """The page. Its scripts and styles are linked, because the policy forbids inline ones."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"{asset('head.html')}<title>{escape(name)} · Paceline watch</title>\n"
        f'<link rel="stylesheet" href="/assets/page.css?token={token}">\n'
        f'<script src="/assets/page.js?token={token}" defer></script></head>\n'
        f'<body><a href="#main" class="skip">Skip to the run</a>\n{asset("definitions.svg")}'
        '<div id="page"></div>\n<noscript><p>A script draws this page, and JavaScript is off. '
        f"`paceline report` writes the run as a file.</p></noscript></body></html>\n"
    )


def make_app(watched: Watched, token: str, port: int) -> Guard:
    """The server as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.responses import (
        HTMLResponse,
        JSONResponse,
        PlainTextResponse,
        Response,
        StreamingResponse,
    )
    from starlette.routing import Route

    assets = find_assets()

    async def show_page(request: Request) -> Response:
        return HTMLResponse(render_page(watched.first.name, token))

    async def send_asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in assets:
            return PlainTextResponse("There is no such file.", 404)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(assets[name], media_type=kind)

    def of_run(answer: Callable[[Followed], Awaitable[Response]]) -> Handler:
        async def find_and_answer(request: Request) -> Response:
            run = watched.find(request.query_params.get("run"))
            if run is None:
                return PlainTextResponse("There is no such run.", 404)
            return await answer(run)

        return find_and_answer

    async def send_events(run: Followed) -> Response:
        if watched.pages >= STREAMS_LIMIT:
            return PlainTextResponse("Too many pages are open.", 503, {"retry-after": "5"})
        return StreamingResponse(run.messages(), media_type="text/event-stream")

    async def send_document(run: Followed) -> Response:
        return Response(await run.document(), media_type="application/json")

    async def send_report(run: Followed) -> Response:
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", run.name)[:64]
        name = f'attachment; filename="{plain}-report.html"'
        return HTMLResponse(await run.report(), headers={"content-disposition": name})

    async def search_log(request: Request) -> Response:
        run = watched.find(request.query_params.get("run"))
        return JSONResponse(await run.search(request.query_params.get("find", "")) if run else [])

    async def ask_to_record(run: Followed) -> Response:
        problem = await run.ask_to_record()
        text = problem or "The next step will be recorded."
        return PlainTextResponse(text, 409 if problem else 202)

    routes = [
        Route("/", show_page),
        Route("/assets/{name:path}", send_asset),
        Route("/events", of_run(send_events)),
        Route("/document", of_run(send_document)),
        Route("/report", of_run(send_report)),
        Route("/log", search_log),
        Route("/record", of_run(ask_to_record), methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), token, port)

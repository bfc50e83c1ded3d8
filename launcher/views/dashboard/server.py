"""The dashboard's server: the page, its data as JSON, and server-sent events. It only reads.

On loopback it answers to loopback's names alone, so that no other site can reach it through a name
of its own. Elsewhere it speaks TLS, and every path begins with a token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import secrets
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launcher.errors import ConfigError, LauncherError
from launcher.runs.certificates.authority import Authority
from launcher.runs.cluster import Cluster
from launcher.runs.output_run import OutputMonitor
from launcher.runs.records.registry import authority_folder
from launcher.views.dashboard.connections import BoundedProtocol, run_server
from launcher.views.dashboard.history import History
from launcher.views.dashboard.logs import LogQuery
from launcher.views.dashboard.prometheus import format_metrics
from launcher.views.dashboard.single_file import PAGE
from launcher.views.dashboard.state import ObservedCluster, Tree

IDENTITY = "urn:motley:dashboard"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response: the page loads nothing from elsewhere, and no page embeds it."""
_EVERY = 1.0
_LONGEST_WORDS = 200


class GuardedApp:
    """An application whose answers all have `HEADERS`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                kept = [(k, v) for k, v in message["headers"] if k.decode() not in HEADERS]
                message = {**message, "headers": [*kept, *added]}
            await send(message)

        await self._app(scope, receive, answer)


def make_app(
    cluster: Cluster,
    token: str = "",
    hosts: tuple[str, ...] = ("*",),
    outputs: Sequence[OutputMonitor] = (),
) -> ASGIApp:
    """Return the application; with a token all of its paths are below `/TOKEN/`.

    Args:
        hosts: the names in a request's Host header that are answered.
        outputs: runs that no launcher started.
    """
    observed = ObservedCluster(cluster, outputs)

    async def get_overview(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(observed.get_overview))

    async def get_metrics(_: Request) -> Response:
        text = format_metrics(await run_in_threadpool(observed.get_overview))
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def overview_events(_: Request) -> Response:
        return _event_stream(_watch_overview(observed))

    async def get_run(request: Request) -> Response:
        state, history = await _find_run(observed, request)
        cursor, records = await run_in_threadpool(history.select_lines_after, 0) or (0, "[]")
        # The records are JSON already; they can be many.
        head = json.dumps({**state, "cursor": cursor})
        return Response(f'{head[:-1]}, "records": {records}}}', media_type="application/json")

    async def run_events(request: Request) -> Response:
        cursor = request.headers.get("last-event-id") or request.query_params.get("after", "0")
        after = int(cursor) if re.fullmatch(r"\d{1,18}", cursor) else 0
        await _find_run(observed, request)  # there is such a run
        return _event_stream(_watch_run(observed, request.path_params["run_id"], after))

    async def get_log(request: Request) -> Response:
        names, asked = request.path_params, request.query_params
        after = re.fullmatch(r"(\d{1,9})\.(\d{1,18})", asked.get("after", ""))
        since = re.fullmatch(r"\d{1,12}(\.\d{1,9})?", asked.get("since", ""))
        wanted = LogQuery(
            asked.get("find", "")[:_LONGEST_WORDS],
            float(since[0]) if since else None,
            (int(after[1]), int(after[2])) if after else None,
        )
        found = await run_in_threadpool(observed.get_log, names["run_id"], names["process"], wanted)
        return JSONResponse(found)

    async def answer_error(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 404 if isinstance(error, ConfigError) else 503)

    routes = [
        Route("/metrics", get_metrics),
        Route("/api/overview", get_overview),
        Route("/api/overview/events", overview_events),
        Route("/api/runs/{run_id}", get_run),
        Route("/api/runs/{run_id}/events", run_events),
        Route("/api/runs/{run_id}/logs/{process}", get_log),
        Mount("/", StaticFiles(directory=PAGE, html=True)),
    ]
    app = Starlette(
        routes=[Mount(f"/{token}", routes=routes)] if token else routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
        exception_handlers={LauncherError: answer_error},
    )
    return GuardedApp(app)


async def _find_run(observed: ObservedCluster, request: Request) -> tuple[Tree, History]:
    return await run_in_threadpool(observed.get_run, request.path_params["run_id"])


def _event_stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


async def _watch_overview(observed: ObservedCluster) -> AsyncIterator[str]:
    """Yield the overview whenever it changed."""
    sent: Tree = {}
    while True:
        tree = await run_in_threadpool(observed.get_overview)
        yield ": \n\n" if _is_same(tree, sent) else _format_event("overview", json.dumps(tree))
        sent = tree
        await asyncio.sleep(_EVERY)


async def _watch_run(observed: ObservedCluster, run_id: str, cursor: int) -> AsyncIterator[str]:
    """Yield a run's state whenever it changed, and the lines of its history after a cursor."""
    sent: Tree = {}
    while True:
        state, history = await run_in_threadpool(observed.get_run, run_id)
        if not _is_same(state, sent):
            yield _format_event("state", json.dumps(state))
            sent = state
        found = await run_in_threadpool(history.select_lines_after, cursor)
        if found is None:
            yield _format_event("reset", "{}", 0)
            return
        if found[0] > cursor:
            cursor = found[0]
            yield _format_event("records", found[1], cursor)
        yield ": \n\n"  # a reader that is gone is noticed
        await asyncio.sleep(_EVERY)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two objects differ in nothing but the clock."""
    return {**one, "now": 0} == {**other, "now": 0}


def _format_event(name: str, data: str, cursor: int | None = None) -> str:
    at = "" if cursor is None else f"id: {cursor}\n"
    return f"event: {name}\n{at}data: {data}\n\n"


def is_loopback(address: str) -> bool:
    """Whether an address or name is of this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def serve(
    cluster: Cluster, bind: str, port: int, report: Any, outputs: Sequence[OutputMonitor] = ()
) -> None:
    """Serve until Ctrl-C; `report` gets the page's address once it can be opened.

    Raises:
        ConfigError: the address or port cannot be listened on.
    """
    listening = _open_listener(bind, port)
    port = listening.getsockname()[1]
    private = is_loopback(bind)
    token = "" if private else secrets.token_urlsafe(18)
    names = _page_names(bind)
    shown = f"[{names[0]}]" if ":" in names[0] else names[0]
    hosts = ("localhost", "127.0.0.1", "[::1]", shown) if private else ("*",)
    config = uvicorn.Config(
        make_app(cluster, token, hosts, outputs),
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=BoundedProtocol,
        ws="none",
        timeout_graceful_shutdown=1,
        lifespan="off",
    )
    config.load()
    if private:
        report(f"http://{shown}:{port}/")
    else:
        config.ssl = _make_tls_context(names)
        report(f"https://{shown}:{port}/{token}/")
        report(f"the browser trusts it once it has this CA: {authority_folder() / 'ca.pem'}")
    run_server(config, listening)


def _open_listener(bind: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        if re.fullmatch(r"[\d.:]+", bind) and isinstance(error, socket.gaierror):
            raise ConfigError(f"--bind {bind}: not an IP address, such as 127.0.0.1") from None
        raise ConfigError(
            f"cannot listen on {bind} port {port}: {error.strerror}; give another --bind or --port"
        ) from None


def _page_names(bind: str) -> list[str]:
    """Return the names and addresses of the page, the one to show first."""
    if bind in ("0.0.0.0", "::"):  # noqa: S104 - compared only; a person gave it, and TLS and a token guard it
        return [socket.getfqdn(), socket.gethostname(), "localhost", "127.0.0.1"]
    return [bind]


def _make_tls_context(names: list[str]) -> ssl.SSLContext:
    """Return a context with a fresh certificate of the cluster's CA; no file of it stays."""
    leaf = Authority.open(authority_folder()).issue(IDENTITY, dict.fromkeys(names))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with tempfile.TemporaryDirectory(prefix="motley-", dir=authority_folder().parent) as folder:
        chain = Path(folder, "chain.pem")
        chain.touch(mode=0o600)
        chain.write_bytes(leaf.key + leaf.certificate + leaf.ca)
        context.load_cert_chain(chain)
    return context

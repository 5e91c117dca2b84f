"""Guards in front of all APIs: keys, errors in the form of each API, access log and metrics."""

import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metaphrase.errors import MetaphraseError, explain_error, is_mistake
from metaphrase.serving.batcher import CancelledRequest
from metaphrase.serving.models import UnknownModelError
from metaphrase.serving.service import OverloadError, Service

logger = logging.getLogger(__name__)

PUBLIC_PATHS = ("/health", "/ui", "/ui/settings", "/docs", "/openapi.json")  # without a key: no text goes there
WRONG_KEY = "The API key must be one of the server's."
FAILURE = "The server failed to answer this request."
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Api(NamedTuple):
    """Errors of an API: the body for a status and a message, and the statuses of some errors."""

    prefixes: tuple[str, ...]  # beginnings of its paths, with a slash after the last word
    body: Callable[[int, str], dict[str, Any]]
    unknown_model: int = 400
    overload: int = 503
    wrong_key: int = 401
    reads_keys: bool = False  # True if the endpoints check the keys, which may stand in the body


def _openai_body(status: int, message: str) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _hugging_face_body(status: int, message: str) -> dict[str, Any]:
    kind = "overloaded" if status == 503 else "generation" if status >= 500 else "validation"
    return {"error": message, "error_type": kind}


_LIBRETRANSLATE = ("/translate/", "/translate_file/", "/download_file/", "/detect/", "/languages/")
# The first API with a prefix of the path decides. The last one has all other paths.
APIS = (
    Api(("/v1/",), _openai_body, unknown_model=404),
    # DeepL's clients try again after 429 and 503.
    Api(("/v2/",), lambda status, message: {"message": message}, overload=429, wrong_key=403),
    Api(_LIBRETRANSLATE, lambda status, message: {"error": message}, wrong_key=403, reads_keys=True),
    Api(("/",), _hugging_face_body, unknown_model=404),
)


def find_api(path: str) -> Api:
    """Return the API of a path: `/translation` is Hugging Face's, `/translate` LibreTranslate's."""
    return next((api for api in APIS if f"{path}/".startswith(api.prefixes)), APIS[-1])


def error_response(path: str, status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error in the form of the API of a path."""
    # A message may quote a lone surrogate, which JSON cannot hold.
    message = message.encode(errors="backslashreplace").decode()
    return JSONResponse(find_api(path).body(status, message), status, headers)


async def stream_response(path: str, events: AsyncIterator[dict[str, Any]], end: str = "") -> StreamingResponse:
    """Return server-sent events. Errors before the first event have a status of their own; later ones are an event."""
    first = await anext(events)

    async def send() -> AsyncIterator[str]:
        yield f"data: {json.dumps(first)}\n\n"
        try:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n"
        except Exception as error:
            message = str(error) if isinstance(error, MetaphraseError | OverloadError) else FAILURE
            yield f"data: {json.dumps(find_api(path).body(500, message))}\n\n"
        yield end

    return StreamingResponse(send(), media_type="text/event-stream")


async def answer_error(request: Request, error: Exception) -> Response:
    """Turn an error of an endpoint into a response. The gate answers the unexpected ones."""
    api, message, headers = find_api(request.url.path), str(error), None
    match error:
        case HTTPException():
            status, message, headers = error.status_code, str(error.detail), error.headers
        case OverloadError():
            status, headers = api.overload, {"Retry-After": "1"}
        case UnknownModelError():
            status = api.unknown_model
        case ValidationError():
            status, message = 400, explain_error(error)
        case ValueError() if is_mistake(error):
            status = 400
        case ValueError():
            raise error
        case _:
            status = 499  # nginx's status for a client that closed the connection; nobody reads it
    return error_response(request.url.path, status, message, headers)


_ERRORS = (HTTPException, OverloadError, ValueError, CancelledRequest, ClientDisconnect)
ERROR_HANDLERS = dict.fromkeys(_ERRORS, answer_error)


class Gate:
    """Refuses requests with a wrong key or a large body, and records all of them, also as metrics in the registry."""

    def __init__(self, app: ASGIApp, service: Service, registry: CollectorRegistry):
        self.app, self.service = app, service
        place = {"namespace": "metaphrase", "registry": registry}
        self.requests = Counter("requests", "Answered requests", ("route", "status"), **place)
        self.seconds = Histogram("request_seconds", "Time of a request", ("route",), **place)
        sentences = Counter("sentences", "Sentences that have a target", **place)
        tokens = Counter("tokens", "Tokens that the models read or wrote", ("side",), **place)
        waiting = Gauge("sentences_waiting", "Sentences that wait for the engine", **place)
        waiting.set_function(lambda: service.batcher.num_waiting)
        Gauge("requests_running", "Requests that wait or run", **place).set_function(lambda: service.num_requests)

        def observe(num_sentences: int, num_source_tokens: int, num_target_tokens: int) -> None:
            sentences.inc(num_sentences)
            tokens.labels("source").inc(num_source_tokens)
            tokens.labels("target").inc(num_target_tokens)

        service.batcher.observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, path, status, num_bytes = time.perf_counter(), scope["path"], None, 0
        most = self.service.limits.max_body_kilobytes

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > 1024 * most:
                raise HTTPException(413, f"The body must have at most {most} kB.", {"Connection": "close"})
            return message

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if num_unknown := scope.get("state", {}).get("num_unknown"):
                    message["headers"].append((b"x-unknown-tokens", str(num_unknown).encode()))
            await send(message)

        app, api = self.app, find_api(path)
        key = read_key(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
        if not (path in PUBLIC_PATHS or api.reads_keys or self.service.accepts(key)):
            challenge = {"WWW-Authenticate": "Bearer"} if api.wrong_key == 401 else None
            app = error_response(path, api.wrong_key, WRONG_KEY, challenge)
        try:
            await app(scope, receive_bounded, record_status)
        except Exception as error:
            # The message may hold a client's text, which no log keeps.
            logger.error("%s failed: %s.", route_of(scope), type(error).__name__)
            if status is None:
                await error_response(path, 500, FAILURE)(scope, receive, record_status)
        finally:
            route, status, seconds = route_of(scope), status or 500, time.perf_counter() - started
            self.requests.labels(route, str(status)).inc()
            self.seconds.labels(route).observe(seconds)
            client, method = (scope.get("client") or ("-",))[0], scope["method"]
            logger.info("client=%s method=%s route=%s status=%d ms=%.1f", client, method, route, status, 1000 * seconds)


def route_of(scope: Scope) -> str:
    """Return the pattern of the path, since clients may invent paths without end."""
    return getattr(scope.get("route"), "path", "unknown")


def read_key(header: str) -> str | None:
    """Return the key in a header Authorization."""
    match = re.match(r"(?:bearer|deepl-auth-key) (.*)", header, re.IGNORECASE)
    return match and match[1].strip()

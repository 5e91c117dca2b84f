"""Middleware: largest body, time to read it, keys, access log and metrics."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from metaphrase.serving.errors import FAILURE, error_response, find_api
from metaphrase.serving.service import Service

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Paths without a key: no text goes there.
PUBLIC_PATHS = (
    *("/health", "/v2/health/live", "/v2/health/ready", "/ui", "/ui/settings", "/docs", "/openapi.json"),
    # LibreTranslate needs no key there.
    *("/languages", "/frontend/settings"),
)
# LibreTranslate's clients send the key in the body.
BODY_KEY_PATHS = ("/translate", "/detect")
WRONG_KEY = "The API key must be one of the server's."
# Schemes of the header Authorization.
_SCHEMES = ("bearer ", "deepl-auth-key ")


class _RefusedBody(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Gate:
    """Refuses requests with a large body, a slow body or a wrong key, and records the others."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], service: Service):
        """Wrap an application."""
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, path, status = time.perf_counter(), scope["path"], None

        async def record_status(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.service.is_draining:
                    message = message | {"headers": [*message.get("headers", []), (b"connection", b"close")]}
            await send(message)

        headers = dict(scope["headers"])
        try:
            if not self._is_allowed(path, headers):
                wrong_key = find_api(path).wrong_key
                challenge = {"WWW-Authenticate": "Bearer"} if wrong_key == 401 else None
                await error_response(path, wrong_key, WRONG_KEY, challenge)(scope, receive, record_status)
                return
            body = await self._read_body(headers, receive)
            await self.app(scope, _replay(body, receive), record_status)
        except _RefusedBody as error:
            await error_response(path, error.status, str(error), {"Connection": "close"})(scope, receive, record_status)
        except Exception as error:
            # The message may hold a client's text, which no log keeps.
            logger.error("%s failed: %s.", route_of(scope), type(error).__name__)
            if status is None:
                await error_response(path, 500, FAILURE)(scope, receive, record_status)
        finally:
            route, status = route_of(scope), status or 500
            self.service.metrics.observe_request(route, status, started)
            client = (scope.get("client") or ("-",))[0]
            milliseconds = 1000 * (time.perf_counter() - started)
            logger.info(
                "client=%s method=%s route=%s status=%d ms=%.1f", client, scope["method"], route, status, milliseconds
            )

    def _is_allowed(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if not self.service.needs_key or path in PUBLIC_PATHS:
            return True
        key = read_key(headers.get(b"authorization", b"").decode("latin-1"))
        # Without a header, the endpoint checks the key of the body.
        return self.service.accepts(key) or (key is None and path in BODY_KEY_PATHS)

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limits = self.service.limits
        most = 1024 * limits.max_body_kilobytes
        length = headers.get(b"content-length", b"")
        refused = _RefusedBody(413, f"The body must have at most {limits.max_body_kilobytes} kB.")
        if length.isdigit() and int(length) > most:
            raise refused
        chunks, size, is_last = [], 0, False
        try:
            async with asyncio.timeout(limits.timeout_seconds):
                while not is_last:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _RefusedBody(400, "The client closed the connection.")
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > most:
                        raise refused
                    is_last = not message.get("more_body", False)
        except TimeoutError as error:
            raise _RefusedBody(408, f"The body must arrive within {limits.timeout_seconds:g} seconds.") from error
        return b"".join(chunks)


def route_of(scope: Scope) -> str:
    """Return the pattern of the path, since clients may invent paths without end."""
    return getattr(scope.get("route"), "path", "unknown")


def read_key(header: str) -> str | None:
    """Return the key in a header Authorization."""
    scheme = next((scheme for scheme in _SCHEMES if header.lower().startswith(scheme)), None)
    return None if scheme is None else header[len(scheme) :].strip()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body first."""
    is_sent = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay

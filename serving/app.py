"""The web application with all APIs, and the HTTP server, which answers all requests of open connections before it ends."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence

import anyio
import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from metaphrase.serving import deepl, huggingface, libretranslate, open_inference, openai, ui
from metaphrase.serving.gate import Gate, Metrics, handle_errors
from metaphrase.serving.service import Service

# Time for clients of open connections to send a request that they began before the end.
_GRACE_SECONDS = 0.5


def make_app(service: Service, cors_origins: Sequence[str] = ()) -> FastAPI:
    """Return the application.

    Args:
        service: Models, limits and keys.
        cors_origins: Origins of web pages that may call the server from a browser; `*` is all.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        # All requests are answered by now.
        await anyio.to_thread.run_sync(service.batcher.close)

    metrics = Metrics(service)
    middleware = [Middleware(Gate, service=service, metrics=metrics)]
    if cors_origins:
        cors = Middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
        # Before the gate, so that a browser can read its refusals.
        middleware.insert(0, cors)
    app = FastAPI(
        title="Metaphrase", summary="Sequence-to-sequence models as a service", middleware=middleware, lifespan=lifespan
    )
    handle_errors(app)
    for api in (huggingface, libretranslate, deepl, openai, open_inference, ui):
        app.include_router(api.make_router(service))

    @app.get("/health", tags=["Server"])
    async def health() -> dict[str, str]:
        """Answer as soon as the models are loaded."""
        return {"status": "ok"}

    @app.get("/metrics", tags=["Server"], response_class=Response)
    async def render_metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


class Server(uvicorn.Server):
    """Runs an application until a signal.

    Then it takes no new connections. On open ones it answers the requests that still come for a moment, and tells each client
    that its connection ends. uvicorn alone would reset a connection whose next request has arrived but is not read.
    """

    def __init__(self, config: uvicorn.Config, service: Service):
        """Join the parts."""
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End when all requests are answered."""
        for server in self.servers:
            server.close()
        self._service.is_draining = True
        end = time.monotonic() + _GRACE_SECONDS
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

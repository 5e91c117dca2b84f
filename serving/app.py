"""The web application: all APIs, metrics, health and the page, before one service."""

import contextlib
from collections.abc import AsyncIterator, Sequence

import anyio
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from metaphrase.serving import deepl, huggingface, libretranslate, open_inference, openai, ui
from metaphrase.serving.errors import handle_errors
from metaphrase.serving.middleware import Gate
from metaphrase.serving.service import Service


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

    middleware = [Middleware(Gate, service=service)]
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
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app

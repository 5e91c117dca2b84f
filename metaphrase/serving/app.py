"""The web application with all APIs."""

import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from starlette.middleware.cors import CORSMiddleware

from metaphrase.serving import deepl, huggingface, libretranslate, openai, ui
from metaphrase.serving.gate import ERROR_HANDLERS, Gate
from metaphrase.serving.service import Service


def make_app(service: Service, cors_origins: Sequence[str] = ()) -> FastAPI:
    """Return the application. Web pages of `cors_origins` may call the server from a browser; `*` is all."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        # All requests are answered by now.
        service.batcher.close()

    registry = CollectorRegistry()
    app = FastAPI(title="Metaphrase", lifespan=lifespan, exception_handlers=ERROR_HANDLERS)
    app.summary = "Sequence-to-sequence models as a service"
    app.add_middleware(Gate, service=service, registry=registry)
    # The last one comes first, so that a browser can read the refusals of the gate.
    app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    for api in (huggingface, libretranslate, deepl, openai, ui):
        app.include_router(api.make_router(service))

    @app.get("/health", tags=["Server"])
    async def health() -> dict[str, str]:
        """Answer as soon as the models are loaded."""
        return {"status": "ok"}

    @app.get("/metrics", tags=["Server"], response_class=Response)
    async def render_metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app

"""Open Inference Protocol, version 2, in JSON, as KServe and Triton speak it. Texts are tensors of the datatype BYTES."""

import math
from importlib.metadata import version
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from metaphrase.serving.bodies import read_body, schema_of
from metaphrase.serving.service import Query, Service

_INPUT, _OUTPUT, _VERSION = "text", "text", "1"
_ANY_SHAPE = [-1]


class Tensor(BaseModel):
    """Texts in one input."""

    name: str
    datatype: Literal["BYTES"]
    shape: list[int]
    data: list[str]


class Parameters(BaseModel):
    """Languages, and options of `generate()`."""

    model_config = ConfigDict(extra="allow")
    src_lang: str | None = None
    tgt_lang: str | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)


class Tensors(BaseModel):
    """Body of a request."""

    id: str | None = None
    inputs: list[Tensor] = Field(min_length=1, max_length=1)
    parameters: Parameters = Parameters()


def make_router(service: Service) -> APIRouter:
    """Return the endpoints."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("")
    async def server() -> Response:
        return JSONResponse({"name": "metaphrase", "version": version("metaphrase"), "extensions": []})

    @router.get("/health/live")
    async def live() -> Response:
        return JSONResponse({"live": True})

    @router.get("/health/ready")
    async def ready() -> Response:
        return JSONResponse({"ready": True})

    @router.get("/models/{name}")
    async def model(name: str) -> Response:
        tensor = {"datatype": "BYTES", "shape": _ANY_SHAPE}
        return JSONResponse(
            {
                "name": service.models.find(name).name,
                "versions": [_VERSION],
                "platform": "metaphrase",
                "inputs": [{"name": _INPUT, **tensor}],
                "outputs": [{"name": _OUTPUT, **tensor}],
            }
        )

    @router.get("/models/{name}/ready")
    async def model_ready(name: str) -> Response:
        return JSONResponse({"name": service.models.find(name).name, "ready": True})

    @router.post("/models/{name}/infer", openapi_extra=schema_of(Tensors))
    async def infer(request: Request, name: str) -> Response:
        served = service.models.find(name)
        body = await read_body(request, Tensors)
        result = await service.answer(request, served, _read_query(body), body.parameters.seed)
        texts = [row[0] for row in result.targets]
        output = {"name": _OUTPUT, "datatype": "BYTES", "shape": body.inputs[0].shape, "data": texts}
        fields = {"model_name": served.name, "model_version": _VERSION, "outputs": [output]}
        return JSONResponse(fields if body.id is None else fields | {"id": body.id})

    return router


def _read_query(body: Tensors) -> Query:
    [tensor] = body.inputs
    if math.prod(tensor.shape) != len(tensor.data):
        raise ValueError(f"`shape` must be that of `data`, got {tensor.shape} for {len(tensor.data)} texts.")
    parameters = body.parameters
    return Query(
        tensor.data,
        source_lang=parameters.src_lang,
        target_lang=parameters.tgt_lang,
        options=parameters.model_extra or {},
    )

"""LibreTranslate's API: `libretranslatepy`, and the many applications that speak to a LibreTranslate server."""

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from metaphrase.serving.bodies import read_body, schema_of
from metaphrase.serving.gate import WRONG_KEY, read_key
from metaphrase.serving.models import base_code, identify_languages, name_of
from metaphrase.serving.service import Query, Service

_KINDS = ("application/json", "application/x-www-form-urlencoded")


class Text(BaseModel):
    """Body of a request for the language of a text."""

    q: str
    api_key: str | None = None


class Texts(BaseModel):
    """Body of a request for translations."""

    q: str | list[str]
    source: str
    target: str
    format: Literal["text", "html"] | None = None
    alternatives: int = Field(0, ge=0)
    api_key: str | None = None


def make_router(service: Service) -> APIRouter:
    """Return the endpoints."""
    router = APIRouter(tags=["LibreTranslate"])
    targets_by_source = service.targets_by_source
    codes = list(dict.fromkeys([*targets_by_source, *(code for row in targets_by_source.values() for code in row)]))

    def check_key(request: Request, key: str | None) -> None:
        if not service.accepts(key or read_key(request.headers.get("authorization", ""))):
            raise HTTPException(403, WRONG_KEY)

    @router.post("/translate", openapi_extra=schema_of(Texts, *_KINDS))
    async def translate(request: Request) -> Response:
        body = await read_body(request, Texts)
        check_key(request, body.api_key)
        source = None if body.source == "auto" else body.source
        for code in filter(None, (source, body.target)):
            if base_code(code) not in codes:
                raise ValueError(f"{code} is not supported")
        # LibreTranslate has no alternatives of HTML either.
        num_targets = 1 if body.format == "html" else 1 + body.alternatives
        is_list = isinstance(body.q, list)
        query = Query(
            body.q if is_list else [body.q],
            source_lang=source,
            target_lang=body.target,
            text_format=body.format or "text",
            num_targets=num_targets,
        )
        result, confidences = await service.translate(request, query)
        fields = {"translatedText": [row[0] for row in result.targets]}
        if source is None:
            fields["detectedLanguage"] = [list_confidences(row)[0] for row in confidences]
        if body.alternatives:
            # Two sentences may give the same text.
            fields["alternatives"] = [
                list(dict.fromkeys(text for text in row if text != row[0])) for row in result.targets
            ]
        return JSONResponse(fields if is_list else {name: values[0] for name, values in fields.items()})

    @router.post("/detect", openapi_extra=schema_of(Text, *_KINDS))
    async def detect(request: Request) -> Response:
        body = await read_body(request, Text)
        check_key(request, body.api_key)
        [confidences] = await service.run_in_thread(lambda: identify_languages([body.q], codes))
        return JSONResponse(list_confidences(confidences))

    @router.get("/languages")
    async def languages() -> Response:
        rows = [{"code": code, "name": name_of(code), "targets": targets_by_source.get(code, [])} for code in codes]
        return JSONResponse(rows)

    return router


def list_confidences(confidences: dict[str, float]) -> list[dict[str, Any]]:
    """Return the confidence of each language as LibreTranslate writes them."""
    return [{"confidence": confidence, "language": code} for code, confidence in confidences.items()]

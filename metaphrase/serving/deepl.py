"""DeepL's API for texts: the client `deepl`, and translation tools that have it built in."""

import re
from functools import partial
from typing import Literal
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from metaphrase.serving.models import KINDS, base_code, name_of, read_body, schema_of
from metaphrase.serving.service import Query, Service
from metaphrase.texts.plan import Terms

# The client refuses these targets without a region.
_REGIONS = {
    "en": {"EN-GB": "English (British)", "EN-US": "English (American)"},
    "pt": {"PT-BR": "Portuguese (Brazilian)", "PT-PT": "Portuguese (European)"},
}
_LINE_BREAK = re.compile(r"(?<=\S)[ \t]*\r?\n[ \t]*(?=\S)")  # a line break within a paragraph


class Texts(BaseModel):
    """Body of a request for translations. Fields with another effect than these are refused."""

    model_config = ConfigDict(extra="forbid")
    text: list[str]
    target_lang: str
    source_lang: str | None = None
    tag_handling: Literal["html", "xml"] | None = None
    ignore_tags: list[str] = []
    split_sentences: Literal["0", "1", "nonewlines"] | None = None
    glossary_id: str | None = None
    # DeepL takes the default if the model has no other.
    formality: Literal["default", "prefer_more", "prefer_less"] = "default"
    # Hints. The layout is always kept.
    preserve_formatting: bool | None = None
    context: str | None = None
    model_type: str | None = None
    outline_detection: bool | None = None
    tag_handling_version: str | None = None
    show_billed_characters: bool = False


def make_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v2", tags=["DeepL"])
    num_characters = 0

    @router.post("/translate", openapi_extra=schema_of(Texts, *KINDS))
    async def translate(request: Request) -> Response:
        nonlocal num_characters
        body = await read_body(request, Texts, lists=("text", "ignore_tags"))
        texts, name = body.text, body.glossary_id
        if name and name not in service.glossaries:
            known = ", ".join(service.glossaries) or "none: start the server with --glossaries"
            raise HTTPException(404, f"The glossary must be one of the server's ({known}), got {name!r}.")
        if body.split_sentences == "nonewlines" and body.tag_handling is None:
            texts = [_LINE_BREAK.sub(" ", text) for text in texts]
        # A form has one field for all tags.
        tags = [tag for tags in body.ignore_tags for tag in tags.split(",") if tag]
        terms = service.glossaries[name] if name else Terms()
        text_format, is_split = body.tag_handling or "text", body.split_sentences != "0"
        query = Query(texts, body.source_lang, body.target_lang, text_format, is_split, terms, tags)
        targets, confidences = await service.run(request, query, partial(service.translate_texts, query))
        num_characters += sum(map(len, body.text))
        rows = []
        for text, [target], languages in zip(body.text, targets, confidences, strict=True):
            row = {"detected_source_language": base_code(languages[0]["language"]).upper(), "text": target}
            rows.append(row | ({"billed_characters": len(text)} if body.show_billed_characters else {}))
        return JSONResponse({"translations": rows})

    @router.get("/languages")
    async def languages(request: Request) -> Response:
        # The client sends a form, though a GET has no body.
        side = dict(request.query_params) | dict(parse_qsl((await request.body()).decode()))
        if side.get("type", "source") == "source":
            return JSONResponse([{"language": code.upper(), "name": name_of(code)} for code in service.routes])
        rows = [
            {"language": region, "name": name, "supports_formality": False}
            for code in dict.fromkeys(code for targets in service.routes.values() for code in targets)
            for region, name in _REGIONS.get(code, {code.upper(): name_of(code)}).items()
        ]
        return JSONResponse(rows)

    @router.get("/usage")
    async def usage() -> Response:
        # DeepL's number for accounts without a limit.
        return JSONResponse({"character_count": num_characters, "character_limit": 10**12})

    return router

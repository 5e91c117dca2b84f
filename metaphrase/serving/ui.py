"""The page at `/ui`: translate while typing, with alternatives and the attention of each word."""

import base64
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from metaphrase.analysis.alignment import aligned_layer, cross_attentions, word_weights
from metaphrase.errors import MetaphraseError
from metaphrase.serving.batcher import Ticket
from metaphrase.serving.models import EXAMPLES, name_of, read_body, schema_of
from metaphrase.serving.service import Query, Service, answer, open_model
from metaphrase.texts.documents import split_texts

_FOLDER = Path(__file__).with_name("page")
# Parts that the page of `metaphrase export --format web` has, too.
_COMMON = Path(__file__).parents[1] / "conversion" / "onnx" / "page" / "common"
_HEADERS = {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
_POLICY = (
    "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MAX_ATTENTION_TOKENS = 512  # the weights of all layers and heads grow with the product of both lengths


class Fields(BaseModel):
    """Model and languages of a request."""

    model: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None


class TextFields(Fields):
    """Body of a request for targets."""

    text: str
    num_targets: int = 1


class PairFields(Fields):
    """Body of a request for attention."""

    source: str
    target: str


def make_router(service: Service) -> APIRouter:
    """Return the page and its endpoints."""
    router = APIRouter(tags=["Page"])
    style, script = (
        "".join(path.with_suffix(suffix).read_text(encoding="utf-8") for path in (_COMMON, _FOLDER / "page"))
        for suffix in (".css", ".js")
    )
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    content = page.replace("{{style}}", style).replace("{{script}}", script)
    headers = _HEADERS | {"Content-Security-Policy": _POLICY.format(*digests)}

    @router.get("/ui", response_class=HTMLResponse)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(content, headers=headers)

    @router.get("/ui/settings")
    async def settings() -> dict[str, Any]:
        def name_all(codes: list[str]) -> list[dict[str, str]]:
            return [{"code": code, "name": name_of(code)} for code in sorted(codes, key=name_of)]

        models = [
            {"name": model.name, "task": model.task, "has_attention": model.generator.is_single}
            | {side: name_all(getattr(model, side)) for side in ("source_languages", "target_languages")}
            for model in service.models.values()
        ]
        limits = {"max_text_characters": service.limits.max_text_characters, "max_targets": service.limits.max_beams}
        return {"models": models, "examples": EXAMPLES, **limits, "needs_key": bool(service.keys)}

    @router.post("/ui/translate", openapi_extra=schema_of(TextFields))
    async def translate(request: Request) -> dict[str, Any]:
        """Return each sentence of a text with its targets, and the layout between the sentences."""
        body = await read_body(request, TextFields)
        model = service.find_model(body.model)
        query = Query([body.text], body.source_lang, body.target_lang, num_targets=body.num_targets)

        def work(ticket: Ticket) -> dict[str, Any]:
            generator, _, split_sentences = open_model(model, query, ticket)
            [document], _ = split_texts([generator], query.texts, split_sentences)
            # Alternatives of a sentence, and not of the whole text, are of use to a reader.
            rows = answer(model, dataclasses.replace(query, texts=document.sentences, split_sentences=False), ticket)
            pairs = zip(document.sentences, rows, strict=True)
            sentences = [{"source": source, "targets": list(dict.fromkeys(row))} for source, row in pairs]
            return {"layout": document.layout, "sentences": sentences, "num_unfinished": ticket.num_unfinished}

        return await service.run(request, query, work)

    @router.post("/ui/attention", openapi_extra=schema_of(PairFields))
    async def attend(request: Request) -> dict[str, Any]:
        """Return the words of a source and its target, and the attention from each target word to each source word."""
        body = await read_body(request, PairFields)
        model, pair = service.find_model(body.model), [body.source, body.target]
        query = Query(pair, body.source_lang, body.target_lang)

        def work(ticket: Ticket) -> dict[str, Any]:
            generator, *_ = open_model(model, query, ticket)
            tokenizers = generator.tokenizers
            longest = max(map(len, tokenizers.encode_sources(pair[:1]) + tokenizers.encode_targets(pair[1:])))
            if longest > (most := _MAX_ATTENTION_TOKENS):
                raise MetaphraseError(f"A text must have at most {most} tokens for attention, got {longest}.")
            [attention] = cross_attentions(generator, pair[:1], pair[1:], layer=aligned_layer(generator.model))
            weights = word_weights(attention).astype(float).round(4).tolist()
            return {"source_words": attention.source_words, "target_words": attention.target_words, "weights": weights}

        return await service.run(request, query, lambda ticket: service.batcher.call(ticket, lambda: work(ticket)))

    return router

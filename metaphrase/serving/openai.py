"""OpenAI's API for completions: the client `openai`, and tools that take a base URL.

OpenAI samples at temperature 1 by default. Here a request without `temperature` and `top_p` has the model's own search, such as
beam search. Temperature 0 is greedy search.
"""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from metaphrase.serving.gate import stream_response
from metaphrase.serving.models import ServedModel, read_body, schema_of
from metaphrase.serving.service import Query, Service, cut_at, stream_target


class Prompts(BaseModel):
    """Body of a request. Other options of `generate()` may stand beside these fields.

    `max_tokens` holds for each target; in a translation of several sentences, for each sentence.
    """

    model_config = ConfigDict(extra="allow")
    model: str
    prompt: str | list[str]
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    n: int | None = Field(None, ge=1)
    best_of: Literal[1] | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    user: str | None = None
    # Only values that change nothing.
    echo: Literal[False] | None = None
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    logprobs: None = None
    presence_penalty: float | None = Field(None, ge=0, le=0)
    suffix: str | None = Field(None, max_length=0)
    src_lang: str | None = None
    tgt_lang: str | None = None


def make_router(service: Service) -> APIRouter:
    """Return the endpoints."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    started = int(time.time())

    @router.post("/completions", openapi_extra=schema_of(Prompts))
    async def complete(request: Request) -> Response:
        body = await read_body(request, Prompts)
        model, query = service.find_model(body.model), _read_query(body)
        frame = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "model": model.name}
        frame["created"] = int(time.time())
        if body.stream:
            with_usage = (body.stream_options or {}).get("include_usage", False)
            events = _events(service, model, query, frame, with_usage)
            return await stream_response(request.url.path, events, "data: [DONE]\n\n")
        result = await service.answer(request, model, query)
        targets = [target for row in result.targets for target in row]
        texts = [cut_at(target, query.stops) for target in targets]
        # The count is that of all targets.
        reason = "length" if result.num_unfinished else "stop"
        choices = [
            _choice(text, "stop" if text != target else reason, index)
            for index, (text, target) in enumerate(zip(texts, targets, strict=True))
        ]
        usage = await _count_usage(service, model, query.texts, targets)
        return JSONResponse(frame | {"choices": choices, "usage": usage})

    def describe(model: ServedModel) -> dict[str, Any]:
        return {"id": model.name, "object": "model", "created": started, "owned_by": "metaphrase"}

    @router.get("/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [describe(model) for model in service.models.values()]})

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> Response:
        return JSONResponse(describe(service.find_model(name)))

    return router


def _read_query(body: Prompts) -> Query:
    options = dict(body.model_extra or {})
    if body.max_tokens is not None:
        options["max_new_tokens"] = body.max_tokens
    if body.temperature == 0:
        options |= {"do_sample": False, "num_beams": 1}
    else:
        # 1 leaves all tokens, and clients send it with every request.
        sampling = {"temperature": body.temperature, "top_p": None if body.top_p == 1 else body.top_p}
        options |= {name: value for name, value in sampling.items() if value is not None}
    return Query(
        [body.prompt] if isinstance(body.prompt, str) else body.prompt,
        source_lang=body.src_lang,
        target_lang=body.tgt_lang,
        num_targets=body.n or 1,
        stops=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        seed=body.seed,
        options=options,
    )


async def _events(
    service: Service, model: ServedModel, query: Query, frame: dict[str, Any], with_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """Yield one event for each piece, and one for the usage."""
    texts = []
    async for piece, reason in stream_target(service, model, query):
        texts.append(piece)
        yield frame | {"choices": [_choice(piece, reason)]}
    if with_usage:
        usage = await _count_usage(service, model, query.texts, ["".join(texts)])
        yield frame | {"choices": [], "usage": usage}


def _choice(text: str, reason: str | None, index: int = 0) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": reason}


async def _count_usage(
    service: Service, model: ServedModel, sources: Sequence[str], targets: Sequence[str]
) -> dict[str, int]:
    num_read, num_written = await service.run_in_thread(lambda: model.count_tokens(sources, targets))
    return {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}

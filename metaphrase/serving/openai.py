"""OpenAI's API for chats, completions and embeddings: the client `openai`, and tools that take a base URL."""

import base64
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from metaphrase.errors import MetaphraseError
from metaphrase.serving.gate import stream_response
from metaphrase.serving.models import ServedModel, read_body, schema_of
from metaphrase.serving.service import Query, Service, answer, cut_at, make_query, stream_target

# Values that change nothing, which clients send.
_DEFAULTS = {"best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}, "presence_penalty": 0, "suffix": ""}
_DEFAULTS |= {"logprobs": False, "response_format": {"type": "text"}}


class Message(BaseModel):
    """Message of a chat."""

    role: str
    content: str | list[dict[Literal["type", "text"], str]] | None = None


class Prompts(BaseModel):
    """Body of a request: `prompt` for completions, `messages` for a chat. Other options of `generate()` may stand beside them."""

    model_config = ConfigDict(extra="allow")
    model: str
    prompt: str | list[str] = []
    messages: list[Message] = []
    max_tokens: int | None = Field(None, ge=1)  # of each target, or of each sentence of a translation
    max_completion_tokens: int | None = Field(None, ge=1)  # the newer name
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    n: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    user: str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None


class Texts(BaseModel):
    """Body of a request for embeddings."""

    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"


def make_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    started = int(time.time())

    @router.post("/chat/completions", openapi_extra=schema_of(Prompts))
    @router.post("/completions", openapi_extra=schema_of(Prompts))
    async def complete(request: Request) -> Response:
        body, kind = await read_body(request, Prompts), "text_completion"
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if "/chat/" in request.url.path:
            kind = "chat.completion" + ".chunk" * bool(body.stream)
            # A model reads one text, whatever came before.
            contents = [message.content or "" for message in body.messages if message.role == "user"][-1:]
            texts = [row if isinstance(row, str) else "".join(part.get("text", "") for part in row) for row in contents]
        if not texts:
            raise MetaphraseError("A request must have a `prompt`, or a chat `messages` of the role user, got none.")
        model, query = service.find_model(body.model), _read_query(body, texts)
        frame = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "model": model.name, "created": int(time.time())}
        if body.stream:
            with_usage = (body.stream_options or {}).get("include_usage", False)
            events = _events(service, model, query, frame, with_usage)
            return await stream_response(request.url.path, events, "data: [DONE]\n\n")
        rows = await service.run(request, query, partial(answer, model, query))
        targets = [target for row in rows for target in row]
        choices = []
        for index, target in enumerate(targets):
            text = cut_at(target, query.stops)
            # The count is that of all targets.
            is_cut = bool(request.state.num_unfinished) and text == target
            choices.append(_choice(kind, text, "length" if is_cut else "stop", index))
        usage = await _count_usage(service, model, query.texts, targets)
        return JSONResponse(frame | {"choices": choices, "usage": usage})

    @router.post("/embeddings", openapi_extra=schema_of(Texts))
    async def embed(request: Request) -> Response:
        body = await read_body(request, Texts)
        model, texts = service.find_model(body.model), [body.input] if isinstance(body.input, str) else body.input
        read_texts = partial(model.generator.embed, texts)
        rows = await service.run(request, Query(texts), lambda ticket: model.batcher.call(ticket, read_texts))
        is_coded = body.encoding_format == "base64"
        shown = [base64.b64encode(row.tobytes()).decode() if is_coded else row.tolist() for row in rows]
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(shown)]
        usage = await _count_usage(service, model, texts, [])
        return JSONResponse({"object": "list", "model": model.name, "data": data, "usage": usage})

    def describe(model: ServedModel) -> dict[str, Any]:
        return {"id": model.name, "object": "model", "created": started, "owned_by": "metaphrase"}

    @router.get("/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [describe(model) for model in service.models.values()]})

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> Response:
        return JSONResponse(describe(service.find_model(name)))

    return router


def _read_query(body: Prompts, texts: list[str]) -> Query:
    # OpenAI samples at temperature 1 by default. Here, without `temperature` and `top_p`, the model's own search decides.
    # Top p of 1 leaves all tokens, and clients send it with every request. Temperature 0 is greedy search.
    fields = {"max_new_tokens": body.max_completion_tokens or body.max_tokens, "temperature": body.temperature}
    fields["top_p"] = None if body.top_p == 1 else body.top_p
    if body.temperature == 0:
        fields |= {"temperature": None, "top_p": None, "do_sample": False, "num_beams": 1}
    options = [*(body.model_extra or {}).items(), *fields.items()]
    options = {name: value for name, value in options if value not in (None, _DEFAULTS.get(name))}
    return make_query(texts, body, body.n or 1, options)


async def _events(
    service: Service, model: ServedModel, query: Query, frame: dict[str, Any], with_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """Yield one event for each piece, and one for the usage."""
    texts: list[str] = []
    async for piece, reason in stream_target(service, model, query):
        yield frame | {"choices": [_choice(frame["object"], piece, reason, is_first=not texts)]}
        texts.append(piece)
    if with_usage:
        yield frame | {"choices": [], "usage": await _count_usage(service, model, query.texts, ["".join(texts)])}


def _choice(kind: str, text: str, reason: str | None, index: int = 0, is_first: bool = True) -> dict[str, Any]:
    # Clients join the fields of all pieces.
    message = {"content": text} | ({"role": "assistant"} if is_first else {})
    contents = {"text_completion": {"text": text}, "chat.completion": {"message": message}}
    return contents.get(kind, {"delta": message}) | {"index": index, "logprobs": None, "finish_reason": reason}


async def _count_usage(service: Service, model: ServedModel, sources: Sequence[str], targets: Sequence[str]) -> dict:
    num_read, num_written = await service.run_in_thread(lambda: model.count_tokens(sources, targets))
    return {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}

"""Hugging Face's API: `huggingface_hub.InferenceClient(model=URL)`, and streams as text-generation-inference sends them."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from metaphrase.serving.gate import stream_response
from metaphrase.serving.models import ServedModel, read_body, schema_of
from metaphrase.serving.service import Query, Service, answer, cut_at, make_query, stream_target

_GENERATED = "generated_text"
_OUTPUTS = {"translation": "translation_text", "summarization": "summary_text", "text2text-generation": _GENERATED}
# Paths, with the name of the text in their answer.
_PATHS = {f"/{task}": name for task, name in _OUTPUTS.items()} | {"/generate": _GENERATED}
_STREAM = "/generate_stream"
# Fields of the clients that change nothing here.
_IGNORED = {"clean_up_tokenization_spaces", "truncation", "return_full_text", "decoder_input_details"}


class Parameters(BaseModel):
    """Options. Those of `generate()` stand here, or below `generate_parameters`."""

    model_config = ConfigDict(extra="allow")
    src_lang: str | None = None
    tgt_lang: str | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: list[str] | None = None
    details: bool | None = None
    generate_parameters: dict[str, Any] | None = None


class Labels(BaseModel):
    """Parameters of a classification: the answers, of which `hypothesis_template` makes texts in place of `{}`."""

    model_config = ConfigDict(extra="forbid")
    candidate_labels: list[str]
    hypothesis_template: str = Field("{}", pattern=r"\{\}")
    multi_label: Literal[False] = False


class Inputs(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(extra="forbid")
    inputs: str | list[str]
    parameters: Parameters | None = None
    model: str | None = None
    stream: bool = False
    options: dict[str, Any] | None = None  # hints of older clients, such as `wait_for_model`


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["Hugging Face"])

    async def describe(model: ServedModel, query: Query, targets: list[str], is_finished: bool) -> dict[str, Any]:
        num_source_tokens, num_tokens = await service.run_in_thread(lambda: model.count_tokens(query.texts, targets))
        counts = {"generated_tokens": num_tokens, "input_length": num_source_tokens, "seed": None}
        return {"finish_reason": "eos_token" if is_finished else "length"} | counts

    async def send_events(model: ServedModel, query: Query) -> AsyncIterator[dict[str, Any]]:
        """Yield one event for each piece, and one with the whole text."""
        texts, token = [], {"id": 0, "text": "", "logprob": 0.0, "special": True}
        async for piece, reason in stream_target(service, model, query):
            if piece:
                written = token | {"text": piece, "special": False}
                yield {"index": len(texts), "token": written, "generated_text": None, "details": None}
                texts.append(piece)
            if reason is not None:
                text = "".join(texts)
                details = await describe(model, query, [text], reason == "stop")
                yield {"index": len(texts), "token": token, "generated_text": text, "details": details}

    async def classify(request: Request, model: ServedModel, texts: str | Sequence[str], fields: Labels) -> Response:
        """Answer with the probabilities of the labels, the best label first."""
        choices = [fields.hypothesis_template.replace("{}", label) for label in fields.candidate_labels]
        query = Query([texts] if isinstance(texts, str) else texts)
        score = partial(model.generator.choice_scores, query.texts, choices)
        # The limits are those of all texts.
        checked = replace(query, texts=[*query.texts, *choices])
        rows = await service.run(request, checked, lambda ticket: model.batcher.call(ticket, score))
        shown = []
        for row in rows.tolist():
            ordered = sorted(zip(row, fields.candidate_labels, strict=True), key=lambda pair: -pair[0])
            shown.append([{"label": label, "score": value} for value, label in ordered])
        return JSONResponse(shown[0] if isinstance(texts, str) else shown)

    async def generate(request: Request) -> Response:
        body = await read_body(request, Inputs)
        parameters, path = body.parameters or Parameters(), request.url.path
        if "candidate_labels" in (parameters.model_extra or {}):
            fields = Labels.model_validate(parameters.model_dump(exclude_none=True))
            return await classify(request, service.find_model(body.model), body.inputs, fields)
        options = {**(parameters.model_extra or {}), **(parameters.generate_parameters or {})}
        options = {name: value for name, value in options.items() if name not in _IGNORED and value is not None}
        query = make_query(body.inputs, parameters, options.pop("num_return_sequences", 1), options)
        model = service.find_model(body.model)
        if body.stream or path == _STREAM:
            return await stream_response(path, send_events(model, query))
        targets = await service.run(request, query, partial(answer, model, query))
        # Clients of all tasks post to the root.
        names = [_PATHS[path]] if path in _PATHS else [_OUTPUTS[model.task], _GENERATED]
        texts = [cut_at(target, query.stops) for row in targets for target in row]
        rows = [dict.fromkeys(names, text) for text in texts]
        if parameters.details:
            # The count is that of all targets.
            details = await describe(model, query, texts, not request.state.num_unfinished)
            rows = [row | {"details": details | {"prefill": [], "tokens": []}} for row in rows]
        return JSONResponse(rows)

    for path in ("/", *_PATHS, _STREAM):
        router.add_api_route(path, generate, methods=["POST"], openapi_extra=schema_of(Inputs))
    return router

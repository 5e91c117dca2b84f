"""LibreTranslate's API: `libretranslatepy`, and the many applications that speak to a LibreTranslate server."""

import reprlib
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from metaphrase.errors import MetaphraseError
from metaphrase.serving.batcher import Ticket
from metaphrase.serving.gate import WRONG_KEY, read_key
from metaphrase.serving.models import KINDS, base_code, identify_languages, name_of, read_body, schema_of
from metaphrase.serving.service import Query, Service, check_query
from metaphrase.texts.whole_texts import FILE_SUFFIXES, read_file

_MOST_FILES = 64  # translated files that the server keeps, until further ones come
_UNPACKED = 16  # a document may unpack to so many times the largest body
_MAX_FORM_FIELDS = 100  # no API has so many fields; they bound the work for a form
_FORMATS = {".txt": "text", ".html": "html", ".htm": "html"}


class Text(BaseModel):
    """Body of a request for the language of a text."""

    q: str
    api_key: str | None = None


class File(BaseModel):
    """Form of a request for the translation of a file, beside the file."""

    source: str
    target: str
    api_key: str | None = None


class Texts(File):
    """Body of a request for translations."""

    q: str | list[str]
    format: Literal["text", "html"] | None = None
    alternatives: int = Field(0, ge=0)


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["LibreTranslate"])
    codes = list(dict.fromkeys([*service.routes, *(code for row in service.routes.values() for code in row)]))

    def check(request: Request, body: Text | File) -> dict[str, str | None]:
        """Check the key and the languages of a body. Returns the languages as fields of a query, whose source may be unknown."""
        if not service.accepts(body.api_key or read_key(request.headers.get("authorization", ""))):
            raise HTTPException(403, WRONG_KEY)
        if isinstance(body, Text):
            return {}
        for code in (body.source, body.target):
            if base_code(code) not in codes and (code, code) != ("auto", body.source):
                hint = "" if codes else ": start the server with a name such as en-de=FOLDER"
                raise MetaphraseError(f"{code} is not supported{hint}")
        return {"source_lang": None if body.source == "auto" else body.source, "target_lang": body.target}

    @router.post("/translate", openapi_extra=schema_of(Texts, *KINDS))
    async def translate(request: Request) -> Response:
        body = await read_body(request, Texts)
        languages, texts = check(request, body), [body.q] if isinstance(body.q, str) else body.q
        # LibreTranslate has no alternatives of HTML either.
        num_targets = 1 if body.format == "html" else 1 + body.alternatives
        query = Query(texts, **languages, text_format=body.format or "text", num_targets=num_targets)
        targets, confidences = await service.run(request, query, partial(service.translate_texts, query))
        fields = {"translatedText": [row[0] for row in targets]}
        if query.source_lang is None:
            fields["detectedLanguage"] = [row[0] for row in confidences]
        if body.alternatives:
            # Two sentences may give the same text.
            fields["alternatives"] = [[text for text in dict.fromkeys(row) if text != row[0]] for row in targets]
        return JSONResponse(fields if isinstance(body.q, list) else {name: row[0] for name, row in fields.items()})

    files: dict[str, bytes] = {}

    def translate_document(query: Query, name: str, content: bytes, ticket: Ticket) -> bytes:
        try:
            file = read_file(name, content, _UNPACKED * 1024 * service.limits.max_body_kilobytes)
        except ImportError as error:
            raise MetaphraseError(f"This server reads no {Path(name).suffix} files.") from error
        query = replace(query, texts=file.texts)
        check_query(query, service.limits)
        targets, _ = service.translate_texts(query, ticket)
        return file.fill([target for [target] in targets])

    @router.post("/translate_file")
    async def translate_file(request: Request) -> Response:
        async with request.form(max_files=1, max_fields=_MAX_FORM_FIELDS) as form:
            upload = form.get("file")
            # RFC 7578 forbids `filename*`, so that a part with nothing else is no file.
            if not isinstance(upload, UploadFile) or not upload.filename:
                message = "The body must be multipart/form-data with a `file` that has a `filename`, got none."
                raise MetaphraseError(message)
            body, name, content = File.model_validate(dict(form)), upload.filename, await upload.read()
        languages, suffix = check(request, body), Path(name).suffix.lower()
        if suffix not in (formats := (*_FORMATS, *FILE_SUFFIXES)):
            raise MetaphraseError(f"A file must end in one of {', '.join(formats)}, got {reprlib.repr(name)}.")
        if suffix in _FORMATS:
            query = Query([content.decode("utf-8-sig")], **languages, text_format=_FORMATS[suffix])
            [[target]], _ = await service.run(request, query, partial(service.translate_texts, query))
            content = target.encode()
        else:
            query = Query([], **languages, text_format="xml", split_sentences=True, is_file=True)
            content = await service.run(request, query, partial(translate_document, query, name, content))
        files[name := secrets.token_urlsafe(16) + suffix] = content
        while len(files) > _MOST_FILES:
            del files[next(iter(files))]
        return JSONResponse({"translatedFileUrl": str(request.url_for("download_file", name=name))})

    # Nobody can guess the name of a file, so this path and that of the languages need no key.
    @router.get("/download_file/{name}")
    async def download_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "The server no longer has this file. Send the request again.")
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(files[name], media_type="application/octet-stream", headers=headers)

    @router.post("/detect", openapi_extra=schema_of(Text, *KINDS))
    async def detect(request: Request) -> Response:
        body = await read_body(request, Text)
        check(request, body)
        [confidences] = await service.run_in_thread(lambda: identify_languages([body.q], codes))
        return JSONResponse(confidences)

    @router.get("/languages")
    async def languages() -> Response:
        targets = {code: list(service.routes.get(code, ())) for code in codes}
        return JSONResponse([{"code": code, "name": name_of(code), "targets": targets[code]} for code in codes])

    return router

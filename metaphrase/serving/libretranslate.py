"""LibreTranslate's API: `libretranslatepy`, and the many applications that speak to a LibreTranslate server."""

import asyncio
import reprlib
import secrets
import tempfile
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from metaphrase.errors import MetaphraseError
from metaphrase.serving.gate import DOWNLOAD_PATH, WRONG_KEY, read_key
from metaphrase.serving.models import base_code, check_fields, identify_languages, name_of, read_body, schema_of
from metaphrase.serving.service import Query, Service
from metaphrase.texts.whole_texts import FILE_SUFFIXES, read_file

# The server keeps so many translated files, until further ones come.
_MOST_FILES = 64
# A document unpacks to so many times the largest body.
_UNPACKED = 16
# No API has so many fields. They bound the work for a form.
_MAX_FORM_FIELDS = 100
_FORMATS = {".txt": "text", ".html": "html", ".htm": "html"}
_KINDS = ("application/json", "application/x-www-form-urlencoded")


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
    """Return the endpoints."""
    router = APIRouter(tags=["LibreTranslate"])
    targets_by_source = service.targets_by_source
    codes = list(dict.fromkeys([*targets_by_source, *(code for row in targets_by_source.values() for code in row)]))

    def check_key(request: Request, key: str | None) -> None:
        if not service.accepts(key or read_key(request.headers.get("authorization", ""))):
            raise HTTPException(403, WRONG_KEY)

    def check_languages(source: str, target: str) -> str | None:
        """Return the language of sources, or None if it is to be identified."""
        for code in (source, target):
            if base_code(code) not in codes and (code, code) != ("auto", source):
                raise MetaphraseError(f"{code} is not supported")
        return None if source == "auto" else source

    @router.post("/translate", openapi_extra=schema_of(Texts, *_KINDS))
    async def translate(request: Request) -> Response:
        body = await read_body(request, Texts)
        check_key(request, body.api_key)
        source = check_languages(body.source, body.target)
        is_list = isinstance(body.q, list)
        query = Query(
            body.q if is_list else [body.q],
            source_lang=source,
            target_lang=body.target,
            text_format=body.format or "text",
            # LibreTranslate has no alternatives of HTML either.
            num_targets=1 if body.format == "html" else 1 + body.alternatives,
        )
        result, confidences = await service.translate(request, query)
        fields = {"translatedText": [row[0] for row in result.targets]}
        if source is None:
            fields["detectedLanguage"] = [row[0] for row in confidences]
        if body.alternatives:
            # Two sentences may give the same text.
            fields["alternatives"] = [
                list(dict.fromkeys(text for text in row if text != row[0])) for row in result.targets
            ]
        return JSONResponse(fields if is_list else {name: values[0] for name, values in fields.items()})

    files, reading = {}, asyncio.Lock()

    @router.post("/translate_file")
    async def translate_file(request: Request) -> Response:
        async with request.form(max_files=1, max_fields=_MAX_FORM_FIELDS) as form:
            upload = form.get("file")
            # RFC 7578 forbids `filename*`, so that a part with nothing else is no file.
            if not isinstance(upload, UploadFile) or not upload.filename:
                message = "The body must be multipart/form-data with a `file` that has a `filename`, got none."
                raise MetaphraseError(message)
            body, name, content = check_fields(form, File), upload.filename, await upload.read()
        check_key(request, body.api_key)
        languages = {"source_lang": check_languages(body.source, body.target), "target_lang": body.target}
        suffix = Path(name).suffix.lower()
        if suffix not in (formats := (*_FORMATS, *FILE_SUFFIXES)):
            raise MetaphraseError(f"A file must end in one of {', '.join(formats)}, got {reprlib.repr(name)}.")
        if suffix in _FORMATS:
            query = Query([content.decode()], **languages, text_format=_FORMATS[suffix])
            result, _ = await service.translate(request, query)
            content = result.targets[0][0].encode()
        else:
            content = await translate_document(request, name, content, languages)
        name = secrets.token_urlsafe(16) + suffix
        files[name] = content
        while len(files) > _MOST_FILES:
            del files[next(iter(files))]
        return JSONResponse({"translatedFileUrl": str(request.url_for("download_file", name=name))})

    async def translate_document(
        request: Request, name: str, content: bytes, languages: dict[str, str | None]
    ) -> bytes:
        most_bytes = _UNPACKED * 1024 * service.limits.max_body_kilobytes
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"file{Path(name).suffix.lower()}"
            path.write_bytes(content)
            try:
                # A document may need much memory, so one is read at a time.
                async with reading:
                    file = await service.run_in_thread(lambda: read_file(path, most_bytes))
            except ImportError as error:
                raise MetaphraseError(f"This server reads no {path.suffix} files.") from error
            except ValueError as error:
                # The client does not know the path.
                raise MetaphraseError(str(error).replace(str(path), name)) from None
            query = Query(file.texts, **languages, text_format="xml", split_sentences=True, is_file=True)
            result, _ = await service.translate(request, query)
            await service.run_in_thread(lambda: file.write([row[0] for row in result.targets], path))
            return path.read_bytes()

    @router.get(DOWNLOAD_PATH + "{name}")
    async def download_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "The server no longer has this file. Send the request again.")
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(files[name], media_type="application/octet-stream", headers=headers)

    @router.post("/detect", openapi_extra=schema_of(Text, *_KINDS))
    async def detect(request: Request) -> Response:
        body = await read_body(request, Text)
        check_key(request, body.api_key)
        [confidences] = await service.run_in_thread(lambda: identify_languages([body.q], codes))
        return JSONResponse(confidences)

    @router.get("/languages")
    async def languages() -> Response:
        rows = [{"code": code, "name": name_of(code), "targets": targets_by_source.get(code, [])} for code in codes]
        return JSONResponse(rows)

    return router

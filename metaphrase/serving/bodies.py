"""Read the body of a request, JSON or a form, and check its fields. The gate bounds the size of all bodies."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile

from metaphrase.storage.hints import explain_error

Fields = TypeVar("Fields", bound=BaseModel)
_FORM = "application/x-www-form-urlencoded"
# No API has so many fields. They bound the work for a form.
_MAX_FORM_FIELDS = 100


async def read_body(request: Request, fields: type[Fields], *, lists: tuple[str, ...] = ()) -> Fields:
    """Return the fields of a JSON or form body. A form may repeat the fields `lists`.

    Raises:
        ValueError: If the body cannot be read, or a field is missing or wrong.
    """
    body = await request.body()
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        # curl calls every body a form.
        if kind == _FORM and not body.lstrip().startswith(b"{"):
            # Starlette's parser reads the UTF-8 that curl sends as Latin-1.
            pairs = parse_qs(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=1000)
            content = {name: values if name in lists else values[-1] for name, values in pairs.items()}
        else:
            content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError("The body must be JSON or a form, got neither.") from error
    if not isinstance(content, dict):
        raise ValueError(f"The body must be an object with fields, got {type(content).__name__}.")
    return check_fields(content, fields)


async def read_upload(request: Request, fields: type[Fields]) -> tuple[Fields, str, bytes]:
    """Return the fields of a form with a file, and the name and the content of its field `file`.

    Raises:
        HTTPException: If the form is damaged or has more than one file.
        ValueError: If there is no file, or a field is missing or wrong.
    """
    async with request.form(max_files=1, max_fields=_MAX_FORM_FIELDS) as form:
        file = form.get("file")
        # RFC 7578 forbids `filename*`, so that a part with nothing else is no file.
        if not isinstance(file, UploadFile) or not file.filename:
            raise ValueError("The body must be multipart/form-data with a `file` that has a `filename`, got none.")
        return check_fields(form, fields), file.filename, await file.read()


def check_fields(content: Mapping[str, Any], fields: type[Fields]) -> Fields:
    """Return checked fields. Raises `ValueError` if a field is missing or wrong."""
    try:
        return fields.model_validate(dict(content))
    except ValidationError as error:
        raise ValueError(explain_error(error)) from None


def schema_of(fields: type[BaseModel], *kinds: str) -> dict[str, Any]:
    """Return the description of a body for the OpenAPI page."""
    content = {kind: {"schema": fields.model_json_schema()} for kind in kinds or ("application/json",)}
    return {"requestBody": {"required": True, "content": content}}

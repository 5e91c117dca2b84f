"""Read the body of a request: JSON or a form, checked by a model of its fields."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs

from fastapi import HTTPException, Request
from pydantic import BaseModel, ValidationError

from metaphrase.storage.hints import explain_error

Fields = TypeVar("Fields", bound=BaseModel)
_FORM = "application/x-www-form-urlencoded"


async def read_bytes(request: Request) -> bytes:
    """Return the body. Raises `HTTPException` if it is too large."""
    body, most = b"", request.app.state.limits.max_body_kilobytes
    async for chunk in request.stream():
        body += chunk
        if len(body) > 1024 * most:
            raise HTTPException(413, f"The body must have at most {most} kB.", {"Connection": "close"})
    return body


async def read_body(request: Request, fields: type[Fields], *, lists: tuple[str, ...] = ()) -> Fields:
    """Return the fields of a JSON or form body. A form may repeat the fields `lists`.

    Raises:
        HTTPException: If the body is too large.
        ValueError: If the body cannot be read, or a field is missing or wrong.
    """
    body = await read_bytes(request)
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        # curl calls every body a form.
        if kind == _FORM and not body.lstrip().startswith(b"{"):
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
        HTTPException: If the body is too large.
        ValueError: If the body is no such form, or a field is missing or wrong.
    """
    boundary = re.search('boundary="?([^";,\\s]{1,70})', request.headers.get("content-type", ""))
    body = b"\r\n" + await read_bytes(request)
    values, name, content = {}, None, b""
    for part in body.split(b"\r\n--" + boundary[1].encode())[1:] if boundary else ():
        head, _, data = part.partition(b"\r\n\r\n")
        head = head.decode(errors="replace")
        field, file = re.search('[; ]name="([^"]*)"', head), re.search('filename\\*?=(?:[^"; ]*\'\')?"?([^";]*)', head)
        if field and field[1] == "file" and file:
            name, content = file[1].strip(), data
        elif field:
            values[field[1]] = data.decode(errors="replace")
    if not name:
        raise ValueError("The body must be multipart/form-data with a `file` that has a name, got none.")
    return check_fields(values, fields), name, content


def check_fields(content: Mapping[str, Any], fields: type[Fields]) -> Fields:
    """Return checked fields. Raises `ValueError` if a field is missing or wrong."""
    try:
        return fields.model_validate(content)
    except ValidationError as error:
        raise ValueError(explain_error(error)) from None


def schema_of(fields: type[BaseModel], *kinds: str) -> dict[str, Any]:
    """Return the description of a body for the OpenAPI page."""
    content = {kind: {"schema": fields.model_json_schema()} for kind in kinds or ("application/json",)}
    return {"requestBody": {"required": True, "content": content}}

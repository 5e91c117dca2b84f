"""Read the body of a request: JSON or a form, checked by a model of its fields."""

import json
from typing import Any, TypeVar
from urllib.parse import parse_qs

from fastapi import Request
from pydantic import BaseModel, ValidationError

from metaphrase.storage.hints import explain_error

Fields = TypeVar("Fields", bound=BaseModel)
_FORM = "application/x-www-form-urlencoded"


async def read_body(request: Request, fields: type[Fields], *, lists: tuple[str, ...] = ()) -> Fields:
    """Return the fields of a JSON or form body.

    Args:
        request: The request.
        fields: Names, types and defaults.
        lists: Fields that a form may repeat.

    Raises:
        ValueError: If the body cannot be read, or a field is missing or wrong.
    """
    body = await request.body()
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        # curl calls every body a form.
        if kind in (_FORM, "multipart/form-data") and not body.lstrip().startswith(b"{"):
            content = await _read_form(request, body, kind, lists)
        else:
            content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError("The body must be JSON or a form, got neither.") from error
    if not isinstance(content, dict):
        raise ValueError(f"The body must be an object with fields, got {type(content).__name__}.")
    return check_fields(content, fields)


def check_fields(content: dict[str, Any], fields: type[Fields]) -> Fields:
    """Return checked fields.

    Raises:
        ValueError: If a field is missing or wrong.
    """
    try:
        return fields.model_validate(content)
    except ValidationError as error:
        raise ValueError(explain_error(error)) from None


async def _read_form(request: Request, body: bytes, kind: str, lists: tuple[str, ...]) -> dict[str, Any]:
    if kind == _FORM:
        pairs = parse_qs(body.decode("utf-8"), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=1000)
    else:
        form = await request.form(max_files=0, max_fields=1000)
        pairs = {name: form.getlist(name) for name in form}
    return {name: values if name in lists else values[-1] for name, values in pairs.items()}


def schema_of(fields: type[BaseModel], *kinds: str) -> dict[str, Any]:
    """Return the description of a body for the OpenAPI page."""
    schema = fields.model_json_schema()
    return {
        "requestBody": {
            "required": True,
            "content": {kind: {"schema": schema} for kind in kinds or ("application/json",)},
        }
    }

"""Errors as each API's clients expect them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from metaphrase.serving.batcher import CancelledRequest
from metaphrase.serving.models import UnknownModelError
from metaphrase.serving.service import OverloadError

FAILURE = "The server failed to answer this request."
# nginx's status for a client that closed the connection; nobody reads it.
CLIENT_CLOSED = 499
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Api(NamedTuple):
    """Errors of an API.

    Attributes:
        prefixes: Beginnings of its paths.
        body: Returns the body of an error, for its status and message.
        unknown_model: Status for an unknown model or language.
        overload: Status for a server without room.
        wrong_key: Status for a key that is missing or wrong.
    """

    prefixes: tuple[str, ...]
    body: Callable[[int, str], dict[str, Any]]
    unknown_model: int = 400
    overload: int = 503
    wrong_key: int = 401


def _openai_body(status: int, message: str) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _hugging_face_body(status: int, message: str) -> dict[str, Any]:
    kind = "overloaded" if status == 503 else "generation" if status >= 500 else "validation"
    return {"error": message, "error_type": kind}


# The first API with a prefix of the path decides. The last one has all other paths.
APIS = (
    Api(("/v1",), _openai_body, unknown_model=404),
    # DeepL's clients try again after 429 and 503.
    Api(
        ("/v2/translate", "/v2/languages", "/v2/usage", "/v2/glossaries", "/v2/glossary-language-pairs", "/v3"),
        lambda status, message: {"message": message},
        overload=429,
        wrong_key=403,
    ),
    Api(("/v2",), lambda status, message: {"error": message}, unknown_model=404),
    Api(
        ("/translate", "/detect", "/languages", "/frontend"), lambda status, message: {"error": message}, wrong_key=403
    ),
    Api(("/",), _hugging_face_body, unknown_model=404),
)


def find_api(path: str) -> Api:
    """Return the API of a path."""
    # `/translation` is Hugging Face's, `/translate` LibreTranslate's.
    return next(
        api
        for api in APIS
        if any(path == prefix or path.startswith(prefix + "/") for prefix in api.prefixes) or api is APIS[-1]
    )


def error_response(path: str, status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error in the form of the API of a path."""
    # A message may quote a lone surrogate, which JSON cannot hold.
    message = message.encode(errors="backslashreplace").decode()
    return JSONResponse(find_api(path).body(status, message), status, headers)


def message_of(error: Exception) -> str:
    """Return the message that a client may see."""
    return str(error) if isinstance(error, ValueError | OverloadError) else FAILURE


def handle_errors(app: FastAPI) -> None:
    """Turn the errors of all endpoints into responses. The gate answers the unexpected ones."""

    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: ValueError) -> Response:
        path = request.url.path
        status = find_api(path).unknown_model if isinstance(error, UnknownModelError) else 400
        return error_response(path, status, str(error))

    @app.exception_handler(OverloadError)
    async def refuse_for_now(request: Request, error: OverloadError) -> Response:
        path = request.url.path
        return error_response(path, find_api(path).overload, str(error), {"Retry-After": str(error.retry_after)})

    @app.exception_handler(CancelledRequest)
    async def end(request: Request, error: CancelledRequest) -> Response:
        return error_response(request.url.path, CLIENT_CLOSED, str(error))

    @app.exception_handler(HTTPException)
    async def answer(request: Request, error: HTTPException) -> Response:
        return error_response(request.url.path, error.status_code, str(error.detail), error.headers)

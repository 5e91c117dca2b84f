"""HTTP server for models: the APIs of Hugging Face, LibreTranslate, DeepL and OpenAI. This file imports no heavy library."""

from dataclasses import dataclass, field, fields
from typing import Any

from metaphrase.errors import MetaphraseError


def _limit(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Limits:
    """Bounds on each request and on all requests together."""

    max_body_kilobytes: int = _limit(1024, "largest body of a request")
    max_texts: int = _limit(128, "maximum texts of a request")
    max_text_characters: int = _limit(100_000, "maximum characters of all texts of a request")
    max_new_tokens_per_text: int = _limit(1024, "maximum tokens of a target that a client may set")
    max_beams: int = _limit(16, "maximum beams, and targets of a source, that a client may set")
    max_requests: int = _limit(256, "maximum requests at once; further ones are refused with status 503")
    timeout_seconds: float = _limit(60.0, "longest time of a request; one that would take longer is refused")

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if not 1 <= value < float("inf"):
                raise MetaphraseError(f"`{item.name}` must be a finite number of at least 1, got {value}.")

"""HTTP server for models: the APIs of Hugging Face, LibreTranslate, DeepL and OpenAI. This file imports no heavy library."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Bounds on each request and on all requests together."""

    max_body_kilobytes: int = field(default=1024, metadata={"help": "largest body of a request"})
    max_texts: int = field(default=128, metadata={"help": "maximum texts of a request"})
    max_text_characters: int = field(default=100_000, metadata={"help": "maximum characters of all texts of a request"})
    max_new_tokens_per_text: int = field(default=1024, metadata={"help": "maximum tokens of a target in a request"})
    max_beams: int = field(default=16, metadata={"help": "maximum beams, and targets of a source, in a request"})
    max_requests: int = field(default=256, metadata={"help": "maximum requests at once; further ones get status 503"})
    timeout_seconds: float = field(default=60.0, metadata={"help": "longest time of a request; others are refused"})

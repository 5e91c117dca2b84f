"""Limits of the server, each with a safe default."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Bounds on each request and on all requests together.

    Attributes:
        max_body_kilobytes: Largest body of a request.
        max_texts: Most texts of a request.
        max_text_characters: Most characters of all texts of a request.
        max_new_tokens_per_text: Most tokens that a request may ask for, for each target.
        max_beams: Most beams, and most targets for each source.
        max_requests: Most requests that wait or run. Further ones are refused at once.
        timeout_seconds: Longest time of a request. One that would take longer is refused at once.
        max_wait_milliseconds: Longest time that a free engine waits for more sentences to fill a batch. A busy engine collects
            sentences anyway.
    """

    max_body_kilobytes: int = 1024
    max_texts: int = 128
    max_text_characters: int = 100_000
    max_new_tokens_per_text: int = 1024
    max_beams: int = 16
    max_requests: int = 256
    timeout_seconds: float = 60.0
    max_wait_milliseconds: float = 0.0

    def __post_init__(self):
        for field in fields(self):
            value, lowest = getattr(self, field.name), 0 if field.name == "max_wait_milliseconds" else 1
            if not lowest <= value < float("inf"):
                raise ValueError(f"`{field.name}` must be a finite number of at least {lowest}, got {value}.")

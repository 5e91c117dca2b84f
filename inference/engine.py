"""Result of a search, decoders that replace a transformers model, and names of devices."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import GenerationConfig


@dataclass(frozen=True)
class Hypothesis:
    """One decoded target.

    Attributes:
        ids: Token ids without start token and padding. The last one is the end of sequence if the model wrote it.
        score: Length-normalized score of beam search, else the sum of log-probabilities. Those of samples are the model's own,
            without temperature, `top_p` and the like. `None` without `return_scores`.
        is_finished: True if the model wrote the end of sequence within the length limit. An end that `forced_eos_token_id` put
            there does not count.
    """

    ids: list[int]
    score: float | None
    is_finished: bool


# Takes the sources of a batch once for each model (token ids). Returns the hypotheses of each source.
BatchSearch = Callable[..., list[list[Hypothesis]]]


class Engine(Protocol):
    """Decoder in place of a transformers model, such as `CTranslate2Engine`. It is no `torch.nn.Module`.

    Attributes:
        generation_config: Defaults for options that a call leaves out.
    """

    generation_config: GenerationConfig

    def searching(self, options: Mapping[str, Any], return_scores: bool) -> AbstractContextManager[BatchSearch]:
        """Return a context with the search for the batches of one call.

        Args:
            options: As for `generate()`.
            return_scores: True if hypotheses carry their score.

        Raises:
            ValueError: If the engine does not support an option.
        """


def is_exported(name_or_path: str | os.PathLike) -> bool:
    """Return True for a folder of CTranslate2."""
    return Path(name_or_path, "model.bin").is_file()


def default_device() -> str | torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def find_device(name: str | torch.device) -> torch.device:
    """Return the device of a name. The device need not be present.

    Raises:
        ValueError: If torch does not know the name.
    """
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"`device` must be one that torch knows, such as cpu, cuda or cuda:1, got {name!r}."
        ) from error

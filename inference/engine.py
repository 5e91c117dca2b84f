"""Engine: what turns batches of sources into hypotheses in place of a model of transformers."""

import abc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig


@dataclass(frozen=True)
class Hypothesis:
    """One decoded target.

    Attributes:
        ids: Token ids without the start token and without padding; the last one is the end of sequence if it was reached.
        score: For beam search its length-normalized score, else the sum of the log-probabilities; `None` if not asked for.
        is_finished: Whether the end of sequence was reached within the length limit, and not forced there by
            `forced_eos_token_id`.
    """

    ids: list[int]
    score: float | None
    is_finished: bool


# From the ids of a batch's sources, as each of the models reads them, to the hypotheses of each source.
BatchSearch = Callable[..., list[list[Hypothesis]]]


class Engine(abc.ABC):
    """What decodes in place of a model of transformers.

    Attributes:
        generation_config: What holds where a call says nothing else.
    """

    generation_config: GenerationConfig

    @abc.abstractmethod
    def searching(
        self, generation_kwargs: Mapping[str, Any], return_scores: bool
    ) -> AbstractContextManager[BatchSearch]:
        """What decodes the batches of one call.

        Args:
            generation_kwargs: As for `generate()`.
            return_scores: Whether hypotheses carry their score.

        Raises:
            ValueError: If the engine cannot do what an option asks for.
        """

"""What the families with sinusoidal positions have in common, beyond what they share with BART."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.bart import Bart
from metaphrase.conversion.family import Weights
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.positions import sinusoidal_table

_TABLES = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))


class Sinusoidal(Bart):
    """BART without a norm on its embeddings. A checkpoint whose table is no table of sinusoids is taken for learned positions.

    Attributes:
        layout: Which sinusoids these are, as `sinusoidal_layout`.
        reads_table: Whether the class reads a table from a checkpoint.
    """

    layout: ClassVar[str]
    reads_table = True
    fixed = Bart.fixed | {"embedding_norm": False}
    fixed.pop("position_embedding_type")

    def position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        return 0

    def read_options(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        if problem := self._padding_in_front(theirs):
            raise ValueError(f"The {self.name} must be one whose positions can be counted: {problem}.")
        options = super().read_options(theirs, weights)
        options |= {"position_embedding_type": "sinusoidal", "sinusoidal_layout": self.layout}
        if self.reads_table:
            tables = [weights.read(name) for name in _TABLES if name in weights]
            if not all(self._is_sinusoidal(table, options["position_offset"]) for table in tables):
                options["position_embedding_type"] = "learned"
                options["max_position_embeddings"] = tables[0].shape[0] - options["position_offset"]
        return options

    def _is_sinusoidal(self, table: torch.Tensor, offset: int) -> bool:
        expected = sinusoidal_table(*table.shape, self.layout)[offset:].to(table.dtype)
        return torch.allclose(table[offset:], expected, rtol=0, atol=4 * torch.finfo(table.dtype).eps)

    def _padding_in_front(self, config: PreTrainedConfig | MetaphraseConfig) -> str | None:
        """What keeps positions from being counted as fairseq does, which gives none to padding wherever it stands."""
        start, padding = config.decoder_start_token_id, config.pad_token_id
        if self.layout != "fairseq" or start is None or start != padding:
            return None
        return f"`decoder_start_token_id` must not be `pad_token_id`, which has no position there, got {start} for both"

    def obstacles_of_positions(self, ours: MetaphraseConfig) -> Iterator[str]:
        if problem := self._padding_in_front(ours):
            yield problem
        kinds = ("sinusoidal", "learned") if self.reads_table else ("sinusoidal",)
        if ours.position_embedding_type not in kinds:
            yield f"`position_embedding_type` must be {' or '.join(kinds)}, got {ours.position_embedding_type}"
            return
        if ours.position_embedding_type == "learned":
            yield from super().obstacles_of_positions(ours)
            return
        for field, expected in (
            ("sinusoidal_layout", self.layout),
            ("position_offset", self.position_offset(ours)),
        ):
            if getattr(ours, field) != expected:
                yield f"`{field}` must be {expected}, got {getattr(ours, field)}"

    def ignorable(self, config: MetaphraseConfig) -> set[str]:
        is_made = config.position_embedding_type == "sinusoidal"
        return super().ignorable(config) | (set(_TABLES) if is_made else set())

    def fill(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        if name not in _TABLES:
            return super().fill(name, shape, config)
        table = sinusoidal_table(*shape, self.layout)
        if config.position_offset:
            # fairseq's, where it stands for padding.
            table[config.pad_token_id] = 0
        return table

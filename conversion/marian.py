"""Families with sinusoidal positions: Marian (OPUS-MT), Pegasus, FSMT (fairseq's WMT19 models), M2M100 and dense NLLB.

Source: Junczys-Dowmunt et al. 2018, arXiv 1804.00344; Zhang et al. 2020, arXiv 1912.08777; Ng et al. 2019,
arXiv 1907.06616; Fan et al. 2021, arXiv 2010.11125; NLLB Team 2022, arXiv 2207.04672.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.bart import Bart
from metaphrase.conversion.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD, Weights
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.positions import sinusoidal_table

_PROJECTION = "model.decoder.output_projection.weight"
_TABLES = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))


class Sinusoidal(Bart):
    """BART with sinusoids and no embedding norm. A checkpoint with any other table becomes learned positions.

    Attributes:
        layout: Value of `sinusoidal_layout`.
        reads_table: True if the class reads the table from a checkpoint.
    """

    layout: ClassVar[str]
    reads_table = True
    fixed = Bart.fixed | {"embedding_norm": False}
    fixed.pop("position_embedding_type")

    def position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        return 0

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        if problem := self._find_leading_padding(theirs):
            raise ValueError(f"The {self.name} must be one whose positions can be counted: {problem}.")
        fields = super().read_extra_fields(theirs, weights)
        fields |= {"position_embedding_type": "sinusoidal", "sinusoidal_layout": self.layout}
        if self.reads_table:
            tables = [weights.read(name) for name in _TABLES if name in weights]
            if not all(self._is_sinusoidal(table, fields["position_offset"]) for table in tables):
                fields["position_embedding_type"] = "learned"
                fields["max_position_embeddings"] = tables[0].shape[0] - fields["position_offset"]
        return fields

    def _is_sinusoidal(self, table: torch.Tensor, offset: int) -> bool:
        expected = sinusoidal_table(*table.shape, self.layout)[offset:].to(table.dtype)
        return torch.allclose(table[offset:], expected, rtol=0, atol=4 * torch.finfo(table.dtype).eps)

    def _find_leading_padding(self, config: PreTrainedConfig | MetaphraseConfig) -> str | None:
        """Return the obstacle of a decoder that starts with padding, to which fairseq gives no position."""
        start, padding = config.decoder_start_token_id, config.pad_token_id
        if self.layout != "fairseq" or start is None or start != padding:
            return None
        return f"`decoder_start_token_id` must not be `pad_token_id`, which has no position there, got {start} for both"

    def find_obstacles_of_positions(self, ours: MetaphraseConfig) -> Iterator[str]:
        if problem := self._find_leading_padding(ours):
            yield problem
        kinds = ("sinusoidal", "learned") if self.reads_table else ("sinusoidal",)
        if ours.position_embedding_type not in kinds:
            yield f"`position_embedding_type` must be {' or '.join(kinds)}, got {ours.position_embedding_type}"
        elif ours.position_embedding_type == "learned":
            yield from super().find_obstacles_of_positions(ours)
        else:
            required = {"sinusoidal_layout": self.layout, "position_offset": self.position_offset(ours)}
            for field, expected in required.items():
                if getattr(ours, field) != expected:
                    yield f"`{field}` must be {expected}, got {getattr(ours, field)}"

    def ignorable_weights(self, config: MetaphraseConfig) -> set[str]:
        is_computed = config.position_embedding_type == "sinusoidal"
        return super().ignorable_weights(config) | (set(_TABLES) if is_computed else set())

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        if name not in _TABLES:
            return super().make_weight(name, shape, config)
        table = sinusoidal_table(*shape, self.layout)
        if config.position_offset:
            # fairseq's row for padding.
            table[config.pad_token_id] = 0
        return table


class Marian(Sinusoidal):
    """Post-norm Marian, with one vocabulary or two."""

    name = "marian"
    layout = "half_split"
    field_names = Sinusoidal.field_names | {"decoder_vocab_size": "decoder_vocab_size"}
    may_have_two_vocabularies = True

    def ties_embeddings(self, theirs: PreTrainedConfig) -> bool:
        return theirs.tie_word_embeddings and theirs.share_encoder_decoder_embeddings

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        return super().write_extra_fields(ours) | {
            "tie_word_embeddings": ours.tie_word_embeddings,
            "share_encoder_decoder_embeddings": ours.share_embeddings,
        }


class Pegasus(Sinusoidal):
    """Pre-norm Pegasus."""

    name = "pegasus"
    layout = "half_split"
    fixed = Sinusoidal.fixed | {"norm_position": "pre", "final_norm": True}


class FSMT(Sinusoidal):
    """Post-norm FSMT, with fairseq's sinusoids and a vocabulary per language."""

    name = "fsmt"
    layout = "fairseq"
    has_logits_bias = False
    may_have_two_vocabularies = True
    field_names = Sinusoidal.field_names | {"vocab_size": "src_vocab_size", "decoder_vocab_size": "tgt_vocab_size"}
    fixed = Sinusoidal.fixed | {"decoder_start_from_labels": True}
    embedding_names = {
        ENCODER_EMBEDDING: (ENCODER_EMBEDDING, DECODER_EMBEDDING, _PROJECTION),
        # transformers 4 omits a decoder embedding tied to the projection, and keeps the encoder's if all three are tied.
        DECODER_EMBEDDING: (DECODER_EMBEDDING, _PROJECTION, ENCODER_EMBEDDING),
        HEAD: (_PROJECTION, DECODER_EMBEDDING, ENCODER_EMBEDDING),
    }

    def position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        return (config.pad_token_id or 0) + 1


class M2M100(Sinusoidal):
    """Pre-norm M2M100, with fairseq's sinusoids, which the class computes and never reads."""

    name = "m2m_100"
    layout = "fairseq"
    reads_table = False
    has_logits_bias = False
    fixed = Sinusoidal.fixed | {"norm_position": "pre", "final_norm": True}
    ignored = (*Sinusoidal.ignored, *(f"{name}s" for name in _TABLES))
    position_offset = FSMT.position_offset

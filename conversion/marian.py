"""What the families with sinusoidal positions have in common, beyond what they share with BART.

Marian (Junczys-Dowmunt et al. 2018, arXiv 1804.00344; OPUS-MT) and Pegasus (Zhang et al. 2020, arXiv 1912.08777).

FSMT (Ng et al. 2019, arXiv 1907.06616): fairseq's models of WMT19, with a vocabulary for each language.

M2M100 (Fan et al. 2021, arXiv 2010.11125) and, of the same class, the dense NLLB models (arXiv 2207.04672).
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.bart import Bart
from metaphrase.conversion.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD, Weights
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


class Marian(Sinusoidal):
    """Post-norm, with one vocabulary or two."""

    name = "marian"
    config_class = "MarianConfig"
    model_class = "MarianMTModel"
    layout = "half_split"
    same = Sinusoidal.same | {"decoder_vocab_size": "decoder_vocab_size"}
    may_have_two_vocabularies = True

    def ties_embeddings(self, theirs: PreTrainedConfig) -> bool:
        return theirs.tie_word_embeddings and theirs.share_encoder_decoder_embeddings

    def write_options(self, ours: MetaphraseConfig) -> dict[str, Any]:
        return super().write_options(ours) | {
            "tie_word_embeddings": ours.tie_word_embeddings,
            "share_encoder_decoder_embeddings": ours.share_embeddings,
        }


class Pegasus(Sinusoidal):
    """Pre-norm."""

    name = "pegasus"
    config_class = "PegasusConfig"
    model_class = "PegasusForConditionalGeneration"
    layout = "half_split"
    fixed = Sinusoidal.fixed | {"norm_position": "pre", "final_norm": True}


_PROJECTION = "model.decoder.output_projection.weight"


class FSMT(Sinusoidal):
    """Post-norm, with fairseq's sinusoids."""

    name = "fsmt"
    config_class = "FSMTConfig"
    model_class = "FSMTForConditionalGeneration"
    layout = "fairseq"
    has_logits_bias = False
    may_have_two_vocabularies = True
    same = Sinusoidal.same | {"vocab_size": "src_vocab_size", "decoder_vocab_size": "tgt_vocab_size"}
    fixed = Sinusoidal.fixed | {"decoder_start_from_labels": True}
    embedding_names = {
        ENCODER_EMBEDDING: (ENCODER_EMBEDDING, DECODER_EMBEDDING, _PROJECTION),
        # transformers 4 left out the embedding that is the projection, too; where all three are one, it kept the encoder's.
        DECODER_EMBEDDING: (DECODER_EMBEDDING, _PROJECTION, ENCODER_EMBEDDING),
        HEAD: (_PROJECTION, DECODER_EMBEDDING, ENCODER_EMBEDDING),
    }

    def position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        return (config.pad_token_id or 0) + 1


class M2M100(Sinusoidal):
    """Pre-norm, with fairseq's sinusoids, which its class makes anew and never reads."""

    name = "m2m_100"
    config_class = "M2M100Config"
    model_class = "M2M100ForConditionalGeneration"
    layout = "fairseq"
    reads_table = False
    has_logits_bias = False
    fixed = Sinusoidal.fixed | {"norm_position": "pre", "final_norm": True}
    ignored = (
        *Sinusoidal.ignored,
        *(f"model.{stack}.embed_positions.weights" for stack in ("encoder", "decoder")),
    )

    def position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        return (config.pad_token_id or 0) + 1

"""A family: an encoder-decoder with its own classes in transformers, and how it maps to Metaphrase.

"Ours" is Metaphrase's side, "theirs" is the family's.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import PreTrainedConfig

from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.weight_files import Kind, WeightFiles

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
ENCODER_EMBEDDING = "model.encoder.embed_tokens.weight"
DECODER_EMBEDDING = "model.decoder.embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
_HEAD_PARTS = ("lm_head.", "final_logits_bias")


class Weights:
    """Weights of a family's checkpoint by their names in the class with a head, even if the checkpoint has no head."""

    def __init__(self, files: WeightFiles, prefix: str):
        self._files = files
        has_prefix = any(name.startswith(prefix) for name in files.kinds)
        self.names = {
            name if has_prefix or name.startswith(_HEAD_PARTS) else prefix + name: name for name in files.kinds
        }

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(self.names[name])

    def kind(self, name: str) -> Kind:
        return self._files.kinds[self.names[name]]


class Counterpart(NamedTuple):
    """The family's weight that holds one of ours.

    Attributes:
        name: Name of their weight.
        part: Index of our part, if their weight holds several of ours.
        parts: Number of equal parts, along the first dimension.
        is_row: True if their weight has an extra first dimension of 1.
        unused_rows: Number of unread rows of zeros in front.
    """

    name: str
    part: int = 0
    parts: int = 1
    is_row: bool = False
    unused_rows: int = 0

    def their_shape(self, our_shape: tuple[int, ...]) -> tuple[int, ...]:
        first, *rest = our_shape
        shape = (first * self.parts + self.unused_rows, *rest)
        return (1, *shape) if self.is_row else shape

    def to_ours(self, theirs: torch.Tensor) -> torch.Tensor:
        """Cut our weight out of theirs."""
        if self.is_row:
            theirs = theirs[0]
        return theirs.chunk(self.parts)[self.part] if self.parts > 1 else theirs

    def to_theirs(self, ours: torch.Tensor) -> torch.Tensor:
        """Return their weight, or our part of it."""
        if self.unused_rows:
            ours = torch.cat((ours.new_zeros(self.unused_rows, *ours.shape[1:]), ours))
        return ours[None] if self.is_row else ours


class Family:
    """Mapping of a family's configuration and weights. Subclasses fill it in.

    Attributes:
        name: The family's `model_type` in transformers, also used on the command line.
        field_names: Our field to the family's field of the same meaning.
        fixed: Our field to its only value in this family.
        free: Our fields that do not change what a trained model computes.
        prefix: Prefix of all weights but the head's, which a checkpoint without a head may lack.
        ignored: Names in checkpoints that hold nothing.
    """

    name: ClassVar[str]
    field_names: ClassVar[Mapping[str, str]]
    fixed: ClassVar[Mapping[str, Any]]
    free: ClassVar[frozenset[str]] = frozenset(
        ("initializer_range", "use_cache", "is_encoder_decoder", "train_padding_embedding", "rope_parameters")
    )
    prefix: ClassVar[str] = ""
    ignored: ClassVar[tuple[str, ...]] = ()

    @property
    def embedding_names(self) -> dict[str, tuple[str, ...]]:
        """Return for each of our three embeddings the family's names, most specific first. A missing one is tied to the next."""
        names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        shared, encoder, decoder = (self.prefix + name for name in names)
        return {
            ENCODER_EMBEDDING: (encoder, shared, decoder, HEAD),
            DECODER_EMBEDDING: (decoder, shared, encoder, HEAD),
            HEAD: (HEAD, decoder, shared, encoder),
        }

    # --- in -------------------------------------------------------------------------------------------------------

    def read_config(self, theirs: PreTrainedConfig, weights: Weights) -> MetaphraseConfig:
        """Return our configuration of a checkpoint.

        Args:
            theirs: The family's configuration.
            weights: The checkpoint's weights, which show what is tied and what a bias holds.

        Raises:
            ValueError: If the checkpoint uses a part that Metaphrase lacks.
        """
        fields = {ours: getattr(theirs, name) for ours, name in self.field_names.items()}
        # Not every family declares every id.
        fields |= {name: getattr(theirs, name, None) for name in SPECIAL_IDS}
        fields |= self.fixed
        fields |= self._read_ties(theirs, weights)
        fields |= self.read_extra_fields(theirs, weights)
        return MetaphraseConfig(dtype=theirs.dtype, **fields)

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        """Return our fields that no single field of theirs holds."""
        return {}

    def ties_embeddings(self, theirs: PreTrainedConfig) -> bool:
        """Return True if the family's class ties both embeddings, unless the checkpoint holds two."""
        return theirs.tie_word_embeddings

    def embedding_name(self, ours: str, weights: Weights) -> str:
        """Return the first existing name of one of our three embeddings."""
        names = self.embedding_names[ours]
        return next((name for name in names if name in weights), names[0])

    def _read_ties(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, bool]:
        source, target, head = (
            self.embedding_name(name, weights) for name in (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)
        )

        # transformers does not tie two weights that differ, whatever the configuration says.
        def are_tied(first: str, second: str, may_tie: bool) -> bool:
            return first == second or (may_tie and _are_equal(weights.read(first), weights.read(second)))

        return {
            "share_embeddings": are_tied(source, target, self.ties_embeddings(theirs)),
            "tie_word_embeddings": are_tied(head, target, theirs.tie_word_embeddings),
        }

    # --- out ------------------------------------------------------------------------------------------------------

    def write_config(self, ours: MetaphraseConfig) -> dict[str, Any]:
        """Return the fields of the family's configuration for one of our models.

        Raises:
            ValueError: If the model has options that the family lacks. The message names all of them.
        """
        if obstacles := list(self.find_obstacles(ours)):
            raise ValueError(f"The model is no {self.name}: " + "; ".join(obstacles) + ".")
        fields = {name: getattr(ours, field) for field, name in self.field_names.items()}
        fields |= {name: getattr(ours, name) for name in SPECIAL_IDS}
        if ours.decoder_start_token_id is None:
            # Not every family allows None.
            del fields["decoder_start_token_id"]
        return fields | self.write_extra_fields(ours)

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        """Return their fields that no single field of ours holds."""
        return {}

    def find_obstacles(self, ours: MetaphraseConfig) -> Iterator[str]:
        """Yield a clause for each option that the family cannot express."""
        for field, value in self.fixed.items():
            if field not in self.free and not _has_effect_of(ours, field, value):
                yield f"`{field}` must be {value}, got {getattr(ours, field)}"
        for field in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(ours, field)
            if ours.num_key_value_heads not in (None, heads):
                yield f"`num_key_value_heads` must be None or `{field}`, got {ours.num_key_value_heads} and {heads}"

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        """Return the family's weight for one of ours."""
        raise NotImplementedError

    def ignorable_weights(self, config: MetaphraseConfig) -> set[str]:
        """Return their weights that follow from our configuration."""
        return set(self.ignored)

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        """Make a weight of theirs that has no counterpart of ours, or return None for any other weight."""
        return None


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


def _has_effect_of(ours: MetaphraseConfig, field: str, value: Any) -> bool:
    actual = getattr(ours, field)
    if field == "attention_scale" and value is None and actual is not None:
        heads = (ours.encoder_attention_heads, ours.decoder_attention_heads)
        return all(actual == ours.get_head_dim(count) ** -0.5 for count in heads)
    return actual == value

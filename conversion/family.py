"""A family: a kind of encoder-decoder that transformers has a class of its own for, and how it maps to Metaphrase's."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from transformers import PreTrainedConfig

from metaphrase.modeling import MetaphraseConfig

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
ENCODER_EMBEDDING = "model.encoder.embed_tokens.weight"
DECODER_EMBEDDING = "model.decoder.embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"


class Weights(Protocol):
    """The tensors of a checkpoint, by the names that the family's class with a head gives them."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> torch.Tensor: ...


class Place(NamedTuple):
    """Where one of our weights is kept in a family's checkpoint.

    Attributes:
        name: The name of the family's weight.
        part: Which of the equal parts of that weight, if it is not all of it.
        parts: The number of these parts, along the first dimension.
        is_row: That weight has a first dimension of 1 besides.
        unused_rows: That weight has so many rows of zeros in front, which are never read.
    """

    name: str
    part: int = 0
    parts: int = 1
    is_row: bool = False
    unused_rows: int = 0

    def their_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of their weight, for that of ours."""
        first, *rest = ours
        shape = (first * self.parts + self.unused_rows, *rest)
        return (1, *shape) if self.is_row else shape

    def take(self, theirs: torch.Tensor) -> torch.Tensor:
        """Our weight, of theirs."""
        if self.is_row:
            theirs = theirs[0]
        return theirs.chunk(self.parts)[self.part] if self.parts > 1 else theirs

    def give(self, ours: torch.Tensor) -> torch.Tensor:
        """Their weight, or its part, of ours."""
        if self.unused_rows:
            ours = torch.cat((ours.new_zeros(self.unused_rows, *ours.shape[1:]), ours))
        return ours[None] if self.is_row else ours


class Family:
    """What the configurations and weights of a family are called, and what they are in Metaphrase. Subclasses fill it in.

    Attributes:
        name: The family's `model_type` in transformers, and the word for it on the command line.
        config_class: Name of transformers' configuration.
        model_class: Name of transformers' class with a head.
        same: For fields of ours, the family's of the same meaning.
        fixed: For fields of ours, the one value that they have in this family.
        free: Fields of ours that say nothing of what a trained model computes: they may have any value.
        prefix: What the names of all weights but the head's begin with; a checkpoint without a head may lack it.
        embedding_names: The family's names of our three embeddings, the most particular first; those that a checkpoint lacks
            are tied to the next.
        ignored: Names in checkpoints that hold nothing.
    """

    name: ClassVar[str]
    config_class: ClassVar[str]
    model_class: ClassVar[str]
    same: ClassVar[Mapping[str, str]]
    fixed: ClassVar[Mapping[str, Any]]
    free: ClassVar[frozenset[str]] = frozenset(
        ("initializer_range", "use_cache", "is_encoder_decoder", "train_padding_embedding", "rope_parameters")
    )
    prefix: ClassVar[str] = ""
    embedding_names: ClassVar[Mapping[str, tuple[str, ...]]]
    ignored: ClassVar[tuple[str, ...]] = ()

    # --- in -------------------------------------------------------------------------------------------------------

    def read_config(self, theirs: PreTrainedConfig, weights: Weights) -> MetaphraseConfig:
        """Our configuration of a checkpoint of the family.

        Args:
            theirs: The family's configuration.
            weights: The checkpoint's, which tell what is tied and what a bias holds.

        Raises:
            ValueError: If the checkpoint uses a part that Metaphrase does not have.
        """
        fields = {ours: getattr(theirs, name) for ours, name in self.same.items()}
        # Not every family declares every id.
        fields |= {name: getattr(theirs, name, None) for name in SPECIAL_IDS}
        fields |= self.fixed
        fields |= self._ties(theirs, weights)
        fields |= self.read_options(theirs, weights)
        return MetaphraseConfig(dtype=theirs.dtype, **fields)

    def read_options(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        """Further fields of ours, which no single field of theirs has."""
        return {}

    def ties_embeddings(self, theirs: PreTrainedConfig) -> bool:
        """Whether the family's class makes one of the two embeddings, where the checkpoint does not keep it from it."""
        return theirs.tie_word_embeddings

    def embedding_name(self, ours: str, weights: Weights) -> str:
        """The family's weight that is one of our three embeddings, the first that there is."""
        names = self.embedding_names[ours]
        return next((name for name in names if name in weights), names[0])

    def _ties(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, bool]:
        source, target, head = (
            self.embedding_name(name, weights) for name in (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)
        )

        # As transformers does: what should be tied but differs is not.
        def are_one(first: str, second: str, may_tie: bool) -> bool:
            return first == second or (may_tie and _are_equal(weights.read(first), weights.read(second)))

        return {
            "share_embeddings": are_one(source, target, self.ties_embeddings(theirs)),
            "tie_word_embeddings": are_one(head, target, theirs.tie_word_embeddings),
        }

    # --- out ------------------------------------------------------------------------------------------------------

    def write_config(self, ours: MetaphraseConfig) -> dict[str, Any]:
        """The fields of the family's configuration for a model of ours.

        Raises:
            ValueError: If the model has options that the family has not; all of them are named.
        """
        obstacles = list(self.obstacles(ours))
        if obstacles:
            raise ValueError(f"The model is no {self.name}: " + "; ".join(obstacles) + ".")
        fields = {name: getattr(ours, field) for field, name in self.same.items()}
        fields |= {name: getattr(ours, name) for name in SPECIAL_IDS}
        if ours.decoder_start_token_id is None:
            # Not every family allows that; what a start from the labels needs is no id.
            del fields["decoder_start_token_id"]
        return fields | self.write_options(ours)

    def write_options(self, ours: MetaphraseConfig) -> dict[str, Any]:
        """Further fields of theirs, which no single field of ours has."""
        return {}

    def obstacles(self, ours: MetaphraseConfig) -> Iterator[str]:
        """What keeps a model from being one of this family, as `field` must be so, got such."""
        for field, value in self.fixed.items():
            given = getattr(ours, field)
            if field in self.free or _is_effectively(ours, field, value):
                continue
            yield f"`{field}` must be {value}, got {given}"
        for field in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(ours, field)
            if ours.num_key_value_heads not in (None, heads):
                yield f"`num_key_value_heads` must be None or `{field}`, got {ours.num_key_value_heads} and {heads}"

    def place(self, name: str, config: MetaphraseConfig) -> Place:
        """Where a weight of ours is in the family's checkpoint."""
        raise NotImplementedError

    def ignorable(self, config: MetaphraseConfig) -> set[str]:
        """Weights of the family's checkpoints that say nothing that a model of this configuration does not know."""
        return set(self.ignored)

    def fill(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        """A weight of the family's class that has no counterpart of ours, or `None` if there is no such weight."""
        return None


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


def _is_effectively(ours: MetaphraseConfig, field: str, value: Any) -> bool:
    """Whether a field has a value, or one that comes to the same."""
    given = getattr(ours, field)
    if field == "attention_scale" and value is None and given is not None:
        heads = (ours.encoder_attention_heads, ours.decoder_attention_heads)
        return all(given == ours.get_head_dim(count) ** -0.5 for count in heads)
    return given == value

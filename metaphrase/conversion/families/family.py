"""A family: an encoder-decoder with a class of its own in transformers, and how it maps to Metaphrase.

"Ours" is Metaphrase's side, "theirs" is the family's. A family is an instance of `Family`: names of fields, fixed fields, quirks.
"""

import functools
import logging
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.checkpoints import RARE_FIELDS, rename_weights
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import SLIDING, STACKS
from metaphrase.storage.weight_files import WeightFiles

logger = logging.getLogger(__name__)

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
ENCODER_EMBEDDING = "model.encoder.embed_tokens.weight"
DECODER_EMBEDDING = "model.decoder.embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
LOGITS_BIAS = "final_logits_bias"

# Fields that most families lack: a family states only its own.
_OFF = ("embedding_norm", "qk_norm", "final_norm", "gated_mlp", "scale_embedding", "attention_bias", "mlp_bias")
_OFF += ("logits_bias", "train_padding_embedding", "decoder_start_from_labels")
_PLAIN_FIELDS = RARE_FIELDS | {"attention_scale": None, "logits_scale": 1.0} | dict.fromkeys(_OFF, False)
RELATIVE_FIELDS = {f"relative_attention_{name}" for name in ("num_buckets", "max_distance", "shared")}


class Counterpart(NamedTuple):
    """The family's weight that holds one of ours."""

    name: str
    # True if their weight has an extra first dimension of 1.
    is_row: bool = False
    # Number of unread rows of zeros in front.
    unused_rows: int = 0

    def their_shape(self, our_shape: tuple[int, ...]) -> tuple[int, ...]:
        first, *rest = our_shape
        shape = (first + self.unused_rows, *rest)
        return (1, *shape) if self.is_row else shape

    def to_ours(self, theirs: torch.Tensor) -> torch.Tensor:
        return theirs[0] if self.is_row else theirs

    def to_theirs(self, ours: torch.Tensor) -> torch.Tensor:
        if self.unused_rows:
            ours = torch.cat((ours.new_zeros(self.unused_rows, *ours.shape[1:]), ours))
        return ours[None] if self.is_row else ours


class Family:
    """Mapping of a family's configuration and weights.

    Attributes:
        field_names: Our field to the family's field of the same meaning. `encoder.hidden_size` is a field of a part.
        fixed: Our field to its only value in this family. A field that most families lack need not be stated.
        variable_fields: Our fields that are neither named nor fixed: the functions of the family read and write them.
        free: Our fields that do not change what a trained model computes.
        module_names: Regular expressions in our names of weights, and the family's names, which are replaced one after the
            other.
        ignored_prefixes: Prefixes of weights that nothing reads, that are of no text or of whole sequences, or that follow from
            our configuration if they have no counterpart.
        has_windows: True for an encoder that has the same window on both sides in all layers.
        prefix: Prefix of all weights but the head's, which a checkpoint without a head may lack.
        embedding_names: For each of our three embeddings the family's names, most specific first. A missing one is tied to the
            next. Also for the bias of the output projection, if the family has two names for it.
    """

    prefix = ""
    ignored_prefixes: tuple[str, ...] = ()
    has_windows = False
    variable_fields: frozenset[str] = frozenset()
    free = frozenset(("initializer_range", "use_cache", "is_encoder_decoder", "train_padding_embedding"))
    free |= {"rope_parameters", "encoder_window", "decoder_window", "classifier_dropout"}
    # A head that classifies texts has its own check.
    free |= {"classifier_hidden_layer", "classifier_pooling"}
    module_names: Mapping[str, str] = {}
    # Our fields of a head that classifies texts, their field of its dropout, and our and their names of the weights of heads.
    classifier: Mapping[str, Any] = {"classifier_hidden_layer": True, "classifier_pooling": "eos"}
    classifier_dropout = "classifier_dropout"
    head_names: Mapping[str, str] = {}
    # A part of the names of their class, and that of a checkpoint; a part of the names of copies, and that of their originals.
    file_name = copy_name = ("", "")

    def __init__(self, name: str, field_names: Mapping[str, str], fixed: Mapping[str, Any]):
        self.name, self.field_names = name, field_names
        variable = {*field_names, *self.variable_fields} - fixed.keys()
        self.fixed = {field: value for field, value in (_PLAIN_FIELDS | fixed).items() if field not in variable}
        names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        shared, encoder, decoder = (self.prefix + embedding for embedding in names)
        self.embedding_names = {
            ENCODER_EMBEDDING: (encoder, shared, decoder, HEAD),
            DECODER_EMBEDDING: (decoder, shared, encoder, HEAD),
            HEAD: (HEAD, decoder, shared, encoder),
        }

    def of_model(self, config: Mapping[str, Any]) -> "Family":
        """Return the family for a model by its configuration file, theirs or ours."""
        return self

    def read_config(self, theirs: PreTrainedConfig, weights: WeightFiles) -> MetaphraseConfig:
        """Return our configuration of a checkpoint, whose weights show what is tied and what a bias holds."""
        if not any(name.startswith(self.prefix) for name in weights.kinds):
            # A checkpoint without a head lacks the prefix.
            of_head = ("lm_head.", LOGITS_BIAS)
            rename_weights(weights, lambda name: name if name.startswith(of_head) else self.prefix + name)
        shares = {name: getattr(theirs, name, None) for name in ("encoder_layerdrop", "decoder_layerdrop")}
        if any(shares.values()):
            logger.warning("LayerDrop is left out: Metaphrase trains all layers, got %s.", shares)
        fields = {ours: operator.attrgetter(name)(theirs) for ours, name in self.field_names.items()}
        # Not every family declares every id.
        fields |= {name: getattr(theirs, name, None) for name in SPECIAL_IDS}
        fields |= self.fixed | self._read_ties(theirs, weights) | self.read_extra_fields(theirs, weights)
        fields |= {**self.classifier, "classifier_dropout": getattr(theirs, self.classifier_dropout, None) or 0.0}
        return MetaphraseConfig(dtype=theirs.dtype, **fields)

    def embedding_name(self, ours: str, weights: WeightFiles) -> str:
        """Return the first existing name of a weight in `embedding_names`."""
        names = self.embedding_names[ours]
        return next((name for name in names if name in weights.kinds), names[0])

    def stored_embeddings(self, config: MetaphraseConfig) -> dict[str, str]:
        """Return their names of embeddings with our stored weights. The second name of each is that of the shared weight."""
        decoder = ENCODER_EMBEDDING if config.share_embeddings else DECODER_EMBEDDING
        stored_as = {DECODER_EMBEDDING: decoder, HEAD: decoder if config.tie_word_embeddings else HEAD}
        names = {shared: ENCODER_EMBEDDING for _, shared, *_ in self.embedding_names.values()}
        names |= dict.fromkeys(self.embedding_names.get(HEAD_BIAS, ()), HEAD_BIAS)
        return names | {theirs: stored_as.get(name, name) for name, (theirs, *_) in self.embedding_names.items()}

    def _read_ties(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, bool]:
        names = (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)
        source, target, head = (self.embedding_name(name, weights) for name in names)

        # transformers does not tie two weights that differ, whatever the configuration says.
        def are_tied(first: str, second: str, may_tie: bool) -> bool:
            # A class without a decoder has one alone.
            both = first in weights.kinds and second in weights.kinds
            return first == second or (may_tie and both and are_equal(weights.read(first), weights.read(second)))

        may_share = theirs.tie_word_embeddings and getattr(theirs, "share_encoder_decoder_embeddings", True)
        may_share = may_share and self.fixed.get("share_embeddings", True)
        return {
            "share_embeddings": are_tied(source, target, may_share),
            "tie_word_embeddings": are_tied(head, target, theirs.tie_word_embeddings),
        }

    def write_config(self, ours: MetaphraseConfig) -> dict[str, Any]:
        """Return the fields of the family's configuration for one of our models. An error names all options in the way."""
        heads = {ours.encoder_attention_heads, ours.decoder_attention_heads}
        allowed = {field: (value,) for field, value in self.fixed.items() if field not in self.free}
        allowed["num_key_value_heads"] = (None, *heads) if len(heads) == 1 else (None,)
        if "head_dim" not in self.field_names:
            # Their class computes it.
            allowed["head_dim"] = (None, ours.hidden_size / min(heads)) if len(heads) == 1 else (None,)
        head_dims = {ours.stack_sizes(stack).head_dim for stack in STACKS}
        if allowed.get("attention_scale") == (None,) and len(head_dims) == 1:
            allowed["attention_scale"] = (None, head_dims.pop() ** -0.5)
        if self.has_windows:
            radius = max(1, ours.encoder_window[0]) if ours.encoder_window else 1
            allowed |= {name: (value,) for name, value in encoder_windows(ours.encoder_layers, radius).items()}
        allowed |= self.allowed_values(ours)
        refuse_obstacles(ours, allowed, f"no {self.name}")
        fields = {name: getattr(ours, field) for field, name in self.field_names.items()}
        fields |= {name: getattr(ours, name) for name in SPECIAL_IDS}
        fields[self.classifier_dropout] = ours.classifier_dropout
        if ours.decoder_start_token_id is None:
            # Not every family allows None.
            del fields["decoder_start_token_id"]
        nested: dict[str, Any] = {}
        for name, value in (fields | self.write_extra_fields(ours)).items():
            *parts, inner = name.split(".")
            functools.reduce(lambda part, outer: part.setdefault(outer, {}), parts, nested)[inner] = value
        return nested

    def offset_behind_padding(self, start: int | None, padding: int | None) -> int:
        """Return the row of the first position in a table that begins with rows for padding, as fairseq's."""
        if start is not None and start == padding:
            text = f"`decoder_start_token_id` must not be `pad_token_id`, which has no position in {self.name}"
            raise MetaphraseError(f"{text}, got {start} for both.")
        return (padding or 0) + 1

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, Any]:
        """Return our fields that no single field of theirs holds."""
        return {}

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        """Return their fields that no single field of ours holds."""
        return {}

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        """Return the values that fields may have, for those that are not fixed and depend on other fields."""
        return {}

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        """Return the family's weight for one of ours."""
        return Counterpart(rename(name, self.module_names))

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor:
        """Make a weight of theirs that has no counterpart of ours."""
        return torch.zeros(shape)


def refuse_obstacles(config: MetaphraseConfig, allowed: Mapping[str, Sequence[Any]], kind: str, hint: str = "") -> None:
    """Raise an error that names all fields of our configuration with a value that is not allowed."""
    if obstacles := [
        f"`{field}` must be {' or '.join(map(str, values))}, got {getattr(config, field)}"
        for field, values in allowed.items()
        if getattr(config, field) not in values
    ]:
        raise MetaphraseError(f"The model is {kind}: {'; '.join(obstacles)}.{hint}")


def rename(name: str, module_names: Mapping[str, str]) -> str:
    """Return the name of a weight after replacing each of some regular expressions, one after the other."""
    for pattern, replacement in module_names.items():
        name = re.sub(pattern, replacement, name)
    return name


def encoder_windows(layers: int, radius: int) -> dict[str, Any]:
    """Return our fields of an encoder whose tokens see `radius` tokens on each side in all layers."""
    return {"encoder_layer_types": [SLIDING] * layers, "encoder_window": [radius, radius]}


def are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two weights have the same shape, type and values."""
    return first.dtype == second.dtype and torch.equal(first, second)

"""Families whose configuration holds one for each stack: T5Gemma, T5Gemma 2, and encoder-decoders of BERT or RoBERTa.

Source: T5Gemma, Zhang et al. 2025, arXiv 2504.06225 and arXiv 2512.14856; Gemma Team 2024, arXiv 2408.00118; encoder-decoders of
encoders, Rothe et al. 2020, arXiv 1907.12461; BERT, Devlin et al. 2019, arXiv 1810.04805; RoBERTa, Liu et al. 2019, arXiv
1907.11692.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from transformers import PreTrainedConfig

from metaphrase.conversion.families import family
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import SLIDING, STACKS
from metaphrase.storage.weight_files import WeightFiles

logger = logging.getLogger(__name__)

_SIZES = {"layers": "num_hidden_layers", "attention_heads": "num_attention_heads", "ffn_dim": "intermediate_size"}


class TwoStacks(family.Family):
    """An encoder and a decoder with a configuration each.

    Attributes:
        shared: Our field to theirs, which must be the same in both stacks.
        stacks: Where the configuration has the fields of each stack.
    """

    free = family.Family.free | family.RELATIVE_FIELDS | {"sinusoidal_layout", "activation_dropout"}
    shared: Mapping[str, str] = {}
    stacks = {"encoder": "encoder", "decoder": "decoder"}

    def __init__(self, name: str, field_names: Mapping[str, str], fixed: Mapping[str, Any]):
        encoder = self.stacks["encoder"]
        stacks, sizes = self.stacks.items(), _SIZES.items()
        fields = {f"{ours}_{size}": f"{path}.{name}" for ours, path in stacks for size, name in sizes}
        fields |= {"vocab_size": f"{encoder}.vocab_size", "decoder_vocab_size": "decoder.vocab_size"}
        fields |= {ours: f"{encoder}.{name}" for ours, name in self.shared.items()}
        super().__init__(name, fields | field_names, fixed)

    def read_stacks(self, theirs: PreTrainedConfig, names: Iterable[str]) -> tuple[PreTrainedConfig, PreTrainedConfig]:
        """Return the configurations of both stacks, in which these fields and the shared ones must be the same."""
        encoder, decoder = (attrgetter(path)(theirs) for path in self.stacks.values())
        for name in (*self.shared.values(), *names):
            one, other = getattr(encoder, name, None), getattr(decoder, name, None)
            if one != other:
                raise MetaphraseError(f"`{name}` must be the same in both stacks, got {one} and {other}.")
        return encoder, decoder

    def write_stack(self, ours: MetaphraseConfig, stack: str) -> dict[str, Any]:
        """Return the fields of one stack that do not lie in `field_names`, without their path."""
        values = {name: getattr(ours, field) for field, name in self.shared.items()}
        values |= {name: getattr(ours, name) for name in family.SPECIAL_IDS[:3]}
        return values | {"tie_word_embeddings": ours.tie_word_embeddings}

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        fields = {"tie_word_embeddings": ours.tie_word_embeddings}
        for stack, path in self.stacks.items():
            fields |= {f"{path}.{name}": value for name, value in self.write_stack(ours, stack).items()}
        return fields


# Where the decoder and the head of each kind are, and the names of the dense layer and of the norm in the head.
_KINDS = {
    "bert": ("decoder.bert", "decoder.cls.predictions", "transform.dense", "transform.LayerNorm"),
    "roberta": ("decoder.roberta", "decoder.lm_head", "dense", "layer_norm"),
    # Has neither types nor dense layer.
    "bert-generation": ("decoder.bert", "decoder.lm_head", "", ""),
}
_BERT_NAMES = {
    r"embed_positions\.token_types": "embeddings.token_type_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embed_tokens": "embeddings.word_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    r"\.layers\.": ".encoder.layer.",
    r"mlp\.up_proj": "intermediate.dense",
    r"mlp\.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "self_attn": "attention",
    "cross_attn": "crossattention",
    "attention_norm": "attention.output.LayerNorm",
    r"attention\.o_proj": "attention.output.dense",
    **{rf"attention\.{name[0]}_proj": f"attention.self.{name}" for name in ("query", "key", "value")},
}


class EncoderDecoder(TwoStacks):
    """An encoder and a decoder of one kind: BERT, RoBERTa or BERT for generation."""

    variable_fields = frozenset(("decoder_max_position_embeddings", "type_vocab_size", "head_transform"))
    shared = {
        "hidden_size": "hidden_size",
        "activation_function": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }
    # The class of a sequence is of no use here.
    ignored_prefixes = ("encoder.pooler.",)

    def __init__(self, kind: str = "bert"):
        fixed: dict[str, Any] = {"position_embedding_type": "learned", "norm_type": "layernorm"}
        fixed |= {"norm_position": "post", "share_embeddings": False}
        fixed |= dict.fromkeys(("embedding_norm", "attention_bias", "mlp_bias", "logits_bias"), True)
        super().__init__("encoder-decoder", {}, fixed)
        self.kind = kind
        decoder, head, dense, norm = _KINDS[kind]
        self.module_names = {
            r"head_transform\.dense": f"{head}.{dense}",
            r"head_transform\.norm": f"{head}.{norm}",
            r"^model\.encoder": "encoder",
            r"^model\.decoder": decoder,
        } | _BERT_NAMES
        source, target = (f"{path}.embeddings.word_embeddings.weight" for path in ("encoder", decoder))
        self.embedding_names = {
            family.ENCODER_EMBEDDING: (source, source),
            family.DECODER_EMBEDDING: (target, f"{head}.decoder.weight"),
            family.HEAD: (f"{head}.decoder.weight", target),
            family.HEAD_BIAS: (f"{head}.decoder.bias", f"{head}.bias"),
        }

    def of_model(self, config: Mapping[str, Any]) -> "EncoderDecoder":
        if "encoder" not in config:
            has_offset = config.get("position_offset", 0) > 0
            kind = ("roberta" if has_offset else "bert") if config.get("head_transform") else "bert-generation"
            return EncoderDecoder(kind)
        kinds = [config[stack].get("model_type") for stack in STACKS]
        if kinds[0] != kinds[1] or kinds[0] not in _KINDS:
            expected = f"`model_type` of both stacks of an encoder-decoder must be the same, one of {', '.join(_KINDS)}"
            raise MetaphraseError(f"{expected}, got {kinds[0]} and {kinds[1]}.")
        return EncoderDecoder(kinds[0])

    def _position_offset(self, start: int | None, padding: int | None) -> int:
        return self.offset_behind_padding(start, padding) if self.kind == "roberta" else 0

    def _read_ties(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, bool]:
        return super()._read_ties(theirs.decoder, weights)

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, Any]:
        encoder, decoder = self.read_stacks(theirs, ("type_vocab_size", "pad_token_id"))
        offset = self._position_offset(theirs.decoder_start_token_id, encoder.pad_token_id)
        ids = {name: getattr(decoder, name) for name in family.SPECIAL_IDS[:3] if getattr(theirs, name, None) is None}
        return ids | {
            "position_offset": offset,
            "max_position_embeddings": encoder.max_position_embeddings - offset,
            "decoder_max_position_embeddings": decoder.max_position_embeddings - offset,
            "type_vocab_size": getattr(encoder, "type_vocab_size", None),
            "head_transform": self.kind != "bert-generation",
            "initializer_range": encoder.initializer_range,
        }

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        offset = self._position_offset(ours.decoder_start_token_id, ours.pad_token_id)
        allowed: dict[str, tuple] = {"position_offset": (offset,)}
        if self.kind == "roberta":
            allowed["activation_function"] = ("gelu",)
        if (ours.type_vocab_size is None) == ours.head_transform:
            allowed["type_vocab_size"] = ("a number",) if ours.head_transform else (None,)
        return allowed

    def write_stack(self, ours: MetaphraseConfig, stack: str) -> dict[str, Any]:
        rows = ours.stack_sizes(stack).max_position_embeddings + ours.position_offset
        values = super().write_stack(ours, stack) | {"model_type": self.kind, "max_position_embeddings": rows}
        values |= dict.fromkeys(("is_decoder", "add_cross_attention"), stack == "decoder")
        optional = {name: getattr(ours, name) for name in ("initializer_range", "type_vocab_size")}
        return values | {name: value for name, value in optional.items() if value is not None}


_GEMMA_FIXED: dict[str, Any] = {"position_embedding_type": "rotary", "norm_type": "rmsnorm", "norm_position": "both"}
_GEMMA_FIXED |= dict.fromkeys(("norm_plus_one", "final_norm", "gated_mlp", "scale_embedding"), True)
_HEAD = "lm_head.out_proj.weight"


def _scalar(config: MetaphraseConfig) -> int:
    """Return the integer whose root divides the attention scores."""
    return round((config.attention_scale or config.stack_sizes("decoder").head_dim ** -0.5) ** -2)


class T5Gemma(TwoStacks):
    """T5Gemma, whose stacks may differ in all sizes but the width of a head."""

    prefix = "model."
    classifier = {"classifier_hidden_layer": False, "classifier_pooling": "last"}
    classifier_dropout = "classifier_dropout_rate"
    head_names = {"classification_head": "score", "classifier": "score.out_proj"}
    free = TwoStacks.free | {"position_offset"}
    variable_fields = frozenset(("decoder_hidden_size", "decoder_num_key_value_heads", "attention_scale"))
    variable_fields |= {"encoder_layer_types", "decoder_layer_types"}
    shared = {"head_dim": "head_dim", "attention_bias": "attention_bias"}
    shared |= {name: name for name in ("max_position_embeddings", "attn_logit_softcapping")}
    shared |= {"activation_function": "hidden_activation", "norm_eps": "rms_norm_eps"}
    module_names = {
        "mlp_norm": "feedforward_norm",
        "mlp_output_norm": "feedforward_output_norm",
        r"(self_attn|cross_attn|feedforward)_norm": r"pre_\1_layernorm",
        r"(self_attn|cross_attn|feedforward)_output_norm": r"post_\1_layernorm",
    }

    def __init__(self, name: str, **fixed: Any):
        fields = {"hidden_size": f"{self.stacks['encoder']}.hidden_size"}
        # The last is written, and the other is free.
        fields |= dict.fromkeys(("activation_dropout", "dropout"), "dropout_rate")
        fields["final_logit_softcapping"] = "decoder.final_logit_softcapping"
        fields["attention_dropout"] = "attention_dropout"
        super().__init__(name, fields, _GEMMA_FIXED | fixed)
        self.embedding_names = {
            family.ENCODER_EMBEDDING: (family.ENCODER_EMBEDDING, family.ENCODER_EMBEDDING),
            family.DECODER_EMBEDDING: (family.DECODER_EMBEDDING, _HEAD),
            family.HEAD: (_HEAD, family.DECODER_EMBEDDING),
        }

    def windows(self, window: int) -> tuple[list[int], int]:
        """Return our windows of both stacks for theirs."""
        return [window, window], window

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, Any]:
        encoder, decoder = self.read_stacks(theirs, ("query_pre_attn_scalar", "sliding_window", "rope_parameters"))
        encoder_window, decoder_window = self.windows(encoder.sliding_window or 0)
        return {
            "decoder_hidden_size": decoder.hidden_size,
            "num_key_value_heads": encoder.num_key_value_heads,
            "decoder_num_key_value_heads": decoder.num_key_value_heads,
            "encoder_layer_types": list(encoder.layer_types),
            "decoder_layer_types": list(decoder.layer_types),
            "encoder_window": encoder_window if SLIDING in encoder.layer_types else None,
            "decoder_window": decoder_window if SLIDING in decoder.layer_types else None,
            "attention_scale": encoder.query_pre_attn_scalar**-0.5,
            "decoder_start_token_id": decoder.bos_token_id,
            "initializer_range": theirs.initializer_range,
            **self.read_rotation(encoder.rope_parameters),
        }

    def read_rotation(self, parameters: dict) -> dict[str, Any]:
        return {"rope_parameters": parameters}

    def write_rotation(self, ours: MetaphraseConfig) -> dict:
        return ours.rope_parameters

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        encoder, decoder = map(ours.stack_sizes, STACKS)
        allowed: dict[str, tuple] = {
            "num_key_value_heads": (ours.num_key_value_heads,),
            "decoder_start_token_id": (ours.bos_token_id,),
            "head_dim": (None, encoder.head_dim) if encoder.head_dim == decoder.head_dim else ("equal in both stacks",),
        }
        if ours.rope_parameters and ours.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            allowed["rope_parameters"] = ("without `partial_rotary_factor`",)
        if ours.attention_scale is not None and not math.isclose(_scalar(ours) ** -0.5, ours.attention_scale):
            allowed["attention_scale"] = (_scalar(ours) ** -0.5,)
        if SLIDING in encoder.layer_types + decoder.layer_types:
            encoder_window, decoder_window = self.windows(self.their_window(ours))
            allowed |= {"encoder_window": (None, encoder_window), "decoder_window": (None, decoder_window)}
        return allowed

    def their_window(self, ours: MetaphraseConfig) -> int | None:
        """Return the window of both stacks in their configuration."""
        return ours.decoder_window or (ours.encoder_window and sum(ours.encoder_window) // 2)

    def write_stack(self, ours: MetaphraseConfig, stack: str) -> dict[str, Any]:
        sizes = ours.stack_sizes(stack)
        return super().write_stack(ours, stack) | {
            "hidden_size": sizes.hidden_size,
            "num_key_value_heads": sizes.key_value_heads,
            "head_dim": sizes.head_dim,
            "layer_types": list(sizes.layer_types),
            # Their class makes a mask of the window in any case.
            "sliding_window": self.their_window(ours) or ours.max_position_embeddings,
            "query_pre_attn_scalar": _scalar(ours),
            "rope_parameters": self.write_rotation(ours),
        }

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        return super().write_extra_fields(ours) | {"vocab_size": ours.decoder_vocab_size}


_VISION = ("model.encoder.vision_tower.", "model.encoder.multi_modal_projector.")
_END_OF_IMAGE = tuple(f"{path}.embed_tokens.eoi_embedding" for path in ("model.encoder", "model.decoder"))
# The class has a tower in any case. This one is small, and its weights are 0.
TOWER = {"hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1}
TOWER |= {"image_size": 1, "patch_size": 1, "model_type": "siglip_vision_model", "vision_use_head": False}


class T5Gemma2(T5Gemma):
    """T5Gemma 2 without images: merged attention, norms of queries and keys, and sliding layers with another rotation."""

    stacks = {"encoder": "encoder.text_config", "decoder": "decoder"}
    file_name = (".text_model.", ".")
    variable_fields = T5Gemma.variable_fields | {"sliding_rope_theta"}
    shared = {ours: name for ours, name in T5Gemma.shared.items() if ours != "attn_logit_softcapping"}
    ignored_prefixes = (*_VISION, *_END_OF_IMAGE)

    def __init__(self):
        super().__init__("t5gemma2", qk_norm=True, merged_attention=True)
        self.embedding_names |= {
            family.DECODER_EMBEDDING: (family.DECODER_EMBEDDING, family.ENCODER_EMBEDDING),
            family.HEAD: (_HEAD, family.ENCODER_EMBEDDING),
        }

    def windows(self, window: int) -> tuple[list[int], int]:
        return [(window + 1) // 2 - 1, window // 2], window

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, Any]:
        logger.warning("The vision tower is left behind: Metaphrase reads text alone.")
        return super().read_extra_fields(theirs, weights)

    def read_rotation(self, parameters: dict) -> dict[str, Any]:
        full, sliding = parameters["full_attention"], parameters["sliding_attention"]
        return {"rope_parameters": full, "sliding_rope_theta": sliding["rope_theta"]}

    def write_rotation(self, ours: MetaphraseConfig) -> dict:
        full = ours.rope_parameters
        theta = ours.sliding_rope_theta
        sliding = full if theta is None else {"rope_type": "default", "rope_theta": theta}
        return {"full_attention": full, "sliding_attention": sliding}

    def their_window(self, ours: MetaphraseConfig) -> int | None:
        return ours.decoder_window or (ours.encoder_window and 1 + sum(ours.encoder_window))

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        tower = {f"encoder.vision_config.{name}": value for name, value in TOWER.items()}
        # No token stands for the end of an image.
        tower |= {"encoder.mm_tokens_per_image": 1, "encoder.eoi_token_index": -1}
        return super().write_extra_fields(ours) | tower

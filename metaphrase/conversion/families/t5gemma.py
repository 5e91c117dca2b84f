"""T5Gemma and T5Gemma 2: encoder-decoders from the layers of Gemma 2 and Gemma 3.

Source: Zhang et al. 2025, arXiv 2504.06225 and arXiv 2512.14856; Gemma Team 2024, arXiv 2408.00118.
"""

import logging
import math
from operator import attrgetter
from typing import Any

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.families.family import (
    DECODER_EMBEDDING,
    ENCODER_EMBEDDING,
    HEAD,
    SPECIAL_IDS,
    Counterpart,
    Family,
    Weights,
)
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import SLIDING, STACKS

logger = logging.getLogger(__name__)

_SIZES = {"layers": "num_hidden_layers", "attention_heads": "num_attention_heads", "ffn_dim": "intermediate_size"}
# Both stacks have the same values.
_SHARED = {
    "head_dim": "head_dim",
    "activation_function": "hidden_activation",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
}
_FIXED = {
    "position_embedding_type": "rotary",
    "norm_type": "rmsnorm",
    "norm_position": "both",
    "norm_plus_one": True,
    "final_norm": True,
    "gated_mlp": True,
    "scale_embedding": True,
    "logits_scale": 1.0,
    "train_padding_embedding": False,
} | dict.fromkeys(("embedding_norm", "mlp_bias", "logits_bias", "decoder_start_from_labels"), False)
# These differ between stacks, or depend on other fields.
_OWN = ("decoder_hidden_size", "decoder_num_key_value_heads", "encoder_layer_types", "decoder_layer_types")
_PARTS = {
    f"{ours}{suffix}": f"{prefix}_{theirs}_layernorm"
    for ours, theirs in (("self_attn", "self_attn"), ("cross_attn", "cross_attn"), ("mlp", "feedforward"))
    for suffix, prefix in (("_norm", "pre"), ("_output_norm", "post"))
}
_HEAD = "lm_head.out_proj.weight"


def _scalar(config: MetaphraseConfig) -> int:
    """Return the integer whose root divides the attention scores."""
    return round((config.attention_scale or config.stack_sizes("decoder").head_dim ** -0.5) ** -2)


class T5Gemma(Family):
    """T5Gemma, whose stacks may differ in all sizes but the width of a head.

    Attributes:
        stacks: Where the configuration has the fields of each stack.
        has_caps: True if attention scores have a largest value.
    """

    prefix = "model."
    free = Family.free | {"sinusoidal_layout", "position_offset", "activation_dropout", "relative_attention_shared"}
    free |= {"relative_attention_num_buckets", "relative_attention_max_distance"}
    stacks = {"encoder": "encoder", "decoder": "decoder"}
    has_caps = True

    def __init__(self, name: str, **fixed: Any):
        fields = {
            f"{ours}_{size}": f"{theirs}.{name}"
            for ours, theirs in self.stacks.items()
            for size, name in _SIZES.items()
        }
        fields |= {"vocab_size": f"{self.stacks['encoder']}.vocab_size", "decoder_vocab_size": "decoder.vocab_size"}
        fields |= {"hidden_size": f"{self.stacks['encoder']}.hidden_size"}
        fields |= {"final_logit_softcapping": "decoder.final_logit_softcapping"}
        fields |= {"dropout": "dropout_rate", "attention_dropout": "attention_dropout"}
        super().__init__(name, fields, _FIXED | fixed)
        varying = (*_OWN, "final_logit_softcapping", *(("attn_logit_softcapping",) if self.has_caps else ()))
        self.fixed = {field: value for field, value in self.fixed.items() if field not in varying}
        self.embedding_names = {
            ENCODER_EMBEDDING: (ENCODER_EMBEDDING, ENCODER_EMBEDDING),
            DECODER_EMBEDDING: (DECODER_EMBEDDING, _HEAD),
            HEAD: (_HEAD, DECODER_EMBEDDING),
        }

    def windows(self, window: int) -> tuple[list[int], int]:
        """Return our windows of both stacks for theirs."""
        return [window, window], window

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        encoder, decoder = (attrgetter(path)(theirs) for path in self.stacks.values())
        shared = _SHARED | ({"attn_logit_softcapping": "attn_logit_softcapping"} if self.has_caps else {})
        for name in (*shared.values(), "query_pre_attn_scalar", "sliding_window", "rope_parameters"):
            values = getattr(encoder, name), getattr(decoder, name)
            if values[0] != values[1]:
                raise ValueError(
                    f"`{name}` must be the same in both stacks of a {self.name}, got {values[0]} and {values[1]}."
                )
        encoder_window, decoder_window = self.windows(encoder.sliding_window or 0)
        return {ours: getattr(encoder, name) for ours, name in shared.items()} | {
            "decoder_hidden_size": decoder.hidden_size,
            "num_key_value_heads": encoder.num_key_value_heads,
            "decoder_num_key_value_heads": decoder.num_key_value_heads,
            "encoder_layer_types": list(encoder.layer_types),
            "decoder_layer_types": list(decoder.layer_types),
            "encoder_window": encoder_window if SLIDING in encoder.layer_types else None,
            "decoder_window": decoder_window if SLIDING in decoder.layer_types else None,
            "attention_scale": encoder.query_pre_attn_scalar**-0.5,
            "activation_dropout": theirs.dropout_rate,
            "decoder_start_token_id": decoder.bos_token_id,
            "initializer_range": theirs.initializer_range,
            **self.read_rotation(encoder.rope_parameters),
        }

    def read_rotation(self, parameters: dict) -> dict[str, Any]:
        """Return our fields of the rotation."""
        return {"rope_parameters": parameters}

    def write_rotation(self, ours: MetaphraseConfig) -> dict:
        """Return their parameters of the rotation."""
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

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "vocab_size": ours.decoder_vocab_size,
            "tie_word_embeddings": ours.tie_word_embeddings,
        }
        for stack, path in self.stacks.items():
            sizes = ours.stack_sizes(stack)
            values = {name: getattr(ours, field) for field, name in _SHARED.items()}
            values |= {name: getattr(ours, name) for name in SPECIAL_IDS[:3]}
            values |= {
                "hidden_size": sizes.hidden_size,
                "num_key_value_heads": sizes.key_value_heads,
                "head_dim": sizes.head_dim,
                "layer_types": list(sizes.layer_types),
                # Their class makes a mask of the window in any case.
                "sliding_window": self.their_window(ours) or ours.max_position_embeddings,
                "query_pre_attn_scalar": _scalar(ours),
                "attn_logit_softcapping": ours.attn_logit_softcapping,
                "rope_parameters": self.write_rotation(ours),
                "tie_word_embeddings": ours.tie_word_embeddings,
            }
            fields |= {f"{path}.{name}": value for name, value in values.items()}
        return fields

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        return Counterpart(".".join(_PARTS.get(part, part) for part in name.split(".")))


_VISION = ("model.encoder.vision_tower.", "model.encoder.multi_modal_projector.")
_END_OF_IMAGE = tuple(f"{path}.embed_tokens.eoi_embedding" for path in ("model.encoder", "model.decoder"))
# The class has a tower in any case. This one is small, and its weights are 0.
TOWER = {"hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1}
TOWER |= {"image_size": 1, "patch_size": 1, "model_type": "siglip_vision_model", "vision_use_head": False}


class T5Gemma2(T5Gemma):
    """T5Gemma 2 without images: merged attention, norms of queries and keys, and sliding layers with another rotation."""

    stacks = {"encoder": "encoder.text_config", "decoder": "decoder"}
    has_caps = False
    ignored_prefixes = (*_VISION, *_END_OF_IMAGE)

    def __init__(self):
        super().__init__("t5gemma2", qk_norm=True, merged_attention=True)
        del self.fixed["sliding_rope_theta"]
        self.embedding_names |= {
            DECODER_EMBEDDING: (DECODER_EMBEDDING, ENCODER_EMBEDDING),
            HEAD: (_HEAD, ENCODER_EMBEDDING),
        }

    def windows(self, window: int) -> tuple[list[int], int]:
        return [(window + 1) // 2 - 1, window // 2], window

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        logger.warning("The vision tower is left behind: Metaphrase reads text alone.")
        return super().read_extra_fields(theirs, weights)

    def read_rotation(self, parameters: dict) -> dict[str, Any]:
        full, sliding = parameters["full_attention"], parameters["sliding_attention"]
        if sliding["rope_type"] != "default":
            raise ValueError(f"`rope_type` of sliding layers must be default, got {sliding['rope_type']!r}.")
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
        return (
            super().write_extra_fields(ours) | tower | {"encoder.mm_tokens_per_image": 1, "encoder.eoi_token_index": -1}
        )

    def file_name(self, name: str) -> str:
        return name.replace(".text_model.", ".")

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        return torch.zeros(shape) if name.startswith(self.ignored_prefixes) else None

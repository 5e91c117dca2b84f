"""Tiny models of every design, with weights large enough to expose mistakes.

With a standard deviation of 0.02 attention is nearly uniform and the output nearly constant. A wrong mask, position or tie
would then stay within every tolerance.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.modeling.configuration_metaphrase import STACKS

POSITIONS: dict[str, dict] = {
    "sinusoidal": {"position_embedding_type": "sinusoidal"},
    # The table is shorter than most test sequences, so that it must grow.
    "half_split": {"position_embedding_type": "sinusoidal", "sinusoidal_layout": "half_split"}
    | {"max_position_embeddings": 4},
    "learned": {"position_embedding_type": "learned", "position_offset": 2},
    "relative": {"position_embedding_type": "relative"},
    "relative_per_layer": {"position_embedding_type": "relative", "relative_attention_shared": False},
    "rotary": {"position_embedding_type": "rotary"},
    "alibi": {"position_embedding_type": "alibi"},
    "none": {"position_embedding_type": "none"},
}
NORM_TYPES = ("layernorm", "rmsnorm")
NORM_POSITIONS = ("pre", "post")
_DEEP_ENCODER = {"encoder_layers": 3, "decoder_layers": 1}
_DEEP_DECODER = {"encoder_layers": 1, "decoder_layers": 3}
_TWO_VOCABULARIES = {"decoder_vocab_size": 31, "share_embeddings": False}
_GROUPED = {"num_key_value_heads": 2}
# Scaled embeddings would outweigh the normed outputs of all sublayers, and a model would repeat its tokens.
_NORMS_AROUND = {"norm_type": "rmsnorm", "norm_position": "both", "norm_plus_one": True, "scale_embedding": False}

# Each position type with one norm type and position in turn, and one position type with each.
_NORMS = [{"norm_type": kind, "norm_position": place} for kind in NORM_TYPES for place in NORM_POSITIONS]
CROSSED: dict[str, dict] = {
    "-".join((name, *norm.values())): POSITIONS[name] | norm
    for name, norm in [*zip(POSITIONS, _NORMS * 2, strict=True), *(("rotary", norm) for norm in _NORMS)]
}

_PRE_LAYERNORM, _POST_LAYERNORM, _PRE_RMSNORM, _POST_RMSNORM = (
    {"norm_type": norm_type, "norm_position": position} for norm_type in NORM_TYPES for position in NORM_POSITIONS
)

# Each position type once, for tests that are too slow for `CROSSED`. The other fields are spread over them.
DESIGNS: dict[str, dict] = {
    "sinusoidal": _POST_LAYERNORM | _DEEP_DECODER | {"gated_mlp": False},
    "half_split": _PRE_RMSNORM | _GROUPED | _DEEP_ENCODER | {"embedding_norm": True},
    "learned": _POST_LAYERNORM
    | _DEEP_ENCODER
    | {"embedding_norm": True, "scale_embedding": False, "logits_bias": True, "qk_norm": True}
    # The ends of BERT.
    | {"decoder_max_position_embeddings": 70, "type_vocab_size": 2, "head_transform": True},
    "relative": _PRE_RMSNORM
    | _TWO_VOCABULARIES
    | _DEEP_DECODER
    | {"attention_scale": 1.0, "logits_scale": 0.5, "scale_embedding": False, "initializer_range": 0.3},
    "relative_per_layer": _PRE_LAYERNORM | _GROUPED | _DEEP_DECODER | {"tie_word_embeddings": False},
    "rotary": _PRE_RMSNORM | _GROUPED | _TWO_VOCABULARIES | _DEEP_DECODER | {"qk_norm": True},
    # Larger weights amplify float32 rounding errors to 5e-5 between processors.
    "alibi": _POST_RMSNORM
    | _DEEP_ENCODER
    | {"tie_word_embeddings": False, "initializer_range": 0.2}
    | {"encoder_attention_heads": 2, "head_dim": 6, "num_key_value_heads": 1},
    # Without a final norm the output of a stack is large.
    "none": _PRE_LAYERNORM | _DEEP_DECODER | {"final_norm": False, "logits_scale": 0.01},
    # The design of T5Gemma, in two parts.
    "windows": _NORMS_AROUND
    | _TWO_VOCABULARIES
    | _DEEP_ENCODER
    | {"encoder_layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "encoder_window": [2, 1]}
    | {"decoder_hidden_size": 24, "decoder_num_key_value_heads": 1},
    "soft_caps": _NORMS_AROUND | _DEEP_DECODER | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
}
DESIGNS = {name: POSITIONS.get(name, POSITIONS["rotary"]) | fields for name, fields in DESIGNS.items()}
# Every other layer with windows: one token to the left and three to the right of a source token, four of a target.
WINDOWS = {"encoder_window": [1, 3], "decoder_window": 4}
ALTERNATING = WINDOWS | {f"{stack}_layer_types": ["sliding_attention", "full_attention"] for stack in STACKS}
# The design of T5Gemma 2.
MERGED = ALTERNATING | {"merged_attention": True, "sliding_rope_theta": 50.0, "qk_norm": True}
SSRU = {"decoder_self_attention": "ssru"}
# Recurrences: Marian's students, our design, and learned positions.
RECURRENT: dict[str, dict] = {
    "ssru_post": SSRU | POSITIONS["sinusoidal"] | _POST_LAYERNORM | {"decoder_layers": 3},
    "ssru_pre": SSRU | {"position_embedding_type": "rotary", "qk_norm": True, "num_key_value_heads": 2},
    "ssru_learned": SSRU | POSITIONS["learned"] | {"decoder_hidden_size": 24, "share_embeddings": False},
}


def tiny_config(**overrides: Any) -> MetaphraseConfig:
    """Return a configuration with hidden size 32, without dropout, with large weights and all biases."""
    fields = {"vocab_size": 37, "hidden_size": 32, "encoder_layers": 2, "decoder_layers": 2}
    fields |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
    fields |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "initializer_range": 0.4}
    fields |= {"attention_bias": True, "mlp_bias": True, "dropout": 0.0, "max_position_embeddings": 64}
    return MetaphraseConfig(**(fields | overrides))


def fields_of(config: MetaphraseConfig) -> dict:
    """Return the fields that describe the model, without its path and dtype."""
    return config.to_dict() | {"_name_or_path": None, "dtype": None}


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Change all biases and norm weights from their initial 0 and 1, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def tiny_model(
    model_class: type[PreTrainedModel] = MetaphraseForConditionalGeneration,
    seed: int = 0,
    attn_implementation: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Return a model of `tiny_config(**overrides)` in evaluation mode, the same for the same arguments."""
    config = tiny_config(**overrides)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return randomize(model, seed).eval()


def padding_mask(lengths: list[int], width: int, side: str) -> torch.Tensor:
    """Return 1 for tokens and 0 for padding on the `left` or `right` side, `(len(lengths), width)`."""
    mask = (torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]).long()
    return mask.flip(-1) if side == "left" else mask


def random_batch(
    config: MetaphraseConfig,
    batch: int = 3,
    source: int = 7,
    target: int = 5,
    padding: str | None = "right",
    seed: int = 0,
    with_labels: bool = False,
) -> dict[str, torch.Tensor]:
    """Return random ids for a model: `input_ids`, `attention_mask`, and `decoder_input_ids` or `labels`.

    Of the special ids only padding and the start token occur. `source` and `target` are columns. Each row of the source has two
    tokens fewer than the row before, but at least one, with `padding` at its side. With None all rows have the same length.
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, config.vocab_size, (batch, source), generator=generator)
    lengths = [source if padding is None else max(1, source - 2 * row) for row in range(batch)]
    attention_mask = padding_mask(lengths, source, padding or "right")
    input_ids = input_ids.masked_fill(attention_mask == 0, config.pad_token_id)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    target_ids = torch.randint(3, config.decoder_vocab_size, (batch, target), generator=generator)
    if with_labels:
        lengths = [max(1, target - row) for row in range(batch)]
        inputs["labels"] = target_ids.masked_fill(padding_mask(lengths, target, "right") == 0, -100)
    else:
        target_ids[:, 0] = config.decoder_start_token_id
        inputs["decoder_input_ids"] = target_ids
    return inputs


def random_sources(config: MetaphraseConfig, **options: Any) -> dict[str, torch.Tensor]:
    batch = random_batch(config, **options)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def run_model(model, **inputs):
    with torch.no_grad():
        return model(**(random_batch(model.config, padding=None) | inputs))

"""BART, mBART and PLBart; BART is also the base of the families in `marian`.

Source: Lewis et al. 2020, arXiv 1910.13461; Liu et al. 2020, arXiv 2001.08210; Ahmad et al. 2021, arXiv 2103.06333.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.family import HEAD_BIAS, Counterpart, Family, Weights
from metaphrase.modeling import MetaphraseConfig

_LOGITS_BIAS = "final_logits_bias"
_PARTS = {
    "o_proj": "out_proj",
    "self_attn_norm": "self_attn_layer_norm",
    "cross_attn": "encoder_attn",
    "cross_attn_norm": "encoder_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "up_proj": "fc1",
    "down_proj": "fc2",
    "embedding_norm": "layernorm_embedding",
    "norm": "layer_norm",
}
_SAME_NAMES = (
    *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "activation_function", "scale_embedding"),
    *("dropout", "attention_dropout", "activation_dropout"),
)
_DEFAULT_INITIALIZER_RANGE = 0.02


class Bart(Family):
    """Post-norm, learned positions, a norm on the embeddings, and a constant bias on the logits.

    Attributes:
        has_logits_bias: True if the class has that bias.
        may_have_two_vocabularies: True if source and target may have separate vocabularies.
    """

    name = "bart"
    prefix = "model."
    field_names = {"vocab_size": "vocab_size", "hidden_size": "d_model"} | {name: name for name in _SAME_NAMES}
    fixed = {
        "position_embedding_type": "learned",
        "norm_type": "layernorm",
        "norm_position": "post",
        "norm_eps": 1e-5,
        "embedding_norm": True,
        "final_norm": False,
        "gated_mlp": False,
        "qk_norm": False,
        "attention_scale": None,
        "attention_bias": True,
        "mlp_bias": True,
        "logits_scale": 1.0,
        "train_padding_embedding": False,
        "decoder_start_from_labels": False,
    }
    free = Family.free | {"relative_attention_num_buckets", "relative_attention_max_distance"}
    free |= {"relative_attention_shared"}
    ignored = ("model.encoder.version", "model.decoder.version")
    has_logits_bias = True
    may_have_two_vocabularies = False

    def position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        """Return the row of the first position: fairseq's tables begin with rows for padding of id 1."""
        return 2

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        fields: dict[str, Any] = {"position_offset": self.position_offset(theirs)}
        fields["initializer_range"] = _DEFAULT_INITIALIZER_RANGE if theirs.init_std is None else theirs.init_std
        if self.has_logits_bias and _LOGITS_BIAS in weights:
            fields["logits_bias"] = bool((weights.read(_LOGITS_BIAS) != 0).any())
        return fields

    def find_obstacles(self, ours: MetaphraseConfig) -> Iterator[str]:
        yield from super().find_obstacles(ours)
        yield from self.find_obstacles_of_positions(ours)
        for field in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(ours, field)
            if (width := ours.get_head_dim(heads)) * heads != ours.hidden_size:
                yield f"`head_dim` times `{field}` must be `hidden_size`, got {width}, {heads} and {ours.hidden_size}"
        if ours.logits_bias and not self.has_logits_bias:
            yield "`logits_bias` must be False, got True"
        if ours.vocab_size != ours.decoder_vocab_size and not self.may_have_two_vocabularies:
            yield f"`decoder_vocab_size` must equal `vocab_size`, got {ours.decoder_vocab_size} and {ours.vocab_size}"

    def find_obstacles_of_positions(self, ours: MetaphraseConfig) -> Iterator[str]:
        # Without an offset the table gets unused rows in front.
        expected = self.position_offset(ours)
        if ours.position_offset not in (0, expected):
            yield f"`position_offset` must be 0 or {expected}, got {ours.position_offset}"

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        std = _DEFAULT_INITIALIZER_RANGE if ours.initializer_range is None else ours.initializer_range
        # Their class ties all three embeddings or none.
        return {"init_std": std, "tie_word_embeddings": ours.tie_word_embeddings and ours.share_embeddings}

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        if name == HEAD_BIAS:
            return Counterpart(_LOGITS_BIAS, is_row=True)
        if name.endswith("embed_positions.weight"):
            return Counterpart(name, unused_rows=self.position_offset(config) - config.position_offset)
        return Counterpart(".".join(_PARTS.get(part, part) for part in name.split(".") if part != "mlp"))

    def ignorable_weights(self, config: MetaphraseConfig) -> set[str]:
        has_zeros = self.has_logits_bias and not config.logits_bias
        return super().ignorable_weights(config) | ({_LOGITS_BIAS} if has_zeros else set())

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        return torch.zeros(shape) if name == _LOGITS_BIAS else None


class MBart(Bart):
    """Pre-norm BART. A target ends with its language code, and training starts the decoder with that code."""

    name = "mbart"
    fixed = Bart.fixed | {"norm_position": "pre", "final_norm": True, "decoder_start_from_labels": True}


class PLBart(Bart):
    """BART for programming languages, with mBART's targets."""

    name = "plbart"
    fixed = Bart.fixed | {"decoder_start_from_labels": True}

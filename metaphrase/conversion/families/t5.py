"""T5 and its relatives.

Source: T5, Raffel et al. 2020, arXiv 1910.10683; mT5, Xue et al. 2021, arXiv 2010.11934; UMT5, Chung et al. 2023, arXiv
2304.09151; LongT5, Guo et al. 2022, arXiv 2112.07916.
"""

from typing import Any

from transformers import PreTrainedConfig

from metaphrase.conversion.families.family import (
    Counterpart,
    Family,
    Weights,
    allowed_windows,
    encoder_windows,
    rename,
)
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig

_T5_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "head_dim": "d_kv",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "d_ff",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "dropout_rate",
}
_T5_FIXED = {
    "position_embedding_type": "relative",
    "relative_attention_shared": True,
    "norm_type": "rmsnorm",
    "norm_position": "pre",
    "final_norm": True,
    "attention_scale": 1.0,
    "share_embeddings": True,
    "train_padding_embedding": True,
}
_T5_NAMES = {
    r"^model\.encoder\.embed_tokens": "shared",
    r"^model\.": "",
    r"coder\.position_bias": "coder.layers.0.self_attn.relative_position_bias",
    r"relative_position_bias\.embedding": "relative_attention_bias",
    r"layers\.(\d+)\.self_attn": r"block.\1.layer.0.SelfAttention",
    r"layers\.(\d+)\.cross_attn": r"block.\1.layer.1.EncDecAttention",
    r"encoder\.layers\.(\d+)\.mlp": r"encoder.block.\1.layer.1.DenseReluDense",
    r"decoder\.layers\.(\d+)\.mlp": r"decoder.block.\1.layer.2.DenseReluDense",
    r"\w+_norm\.weight": "layer_norm.weight",
    r"\.([qkvo])_proj": r".\1",
    "gate_proj": "wi_0",
    "up_proj": "wi_1",
    "down_proj": "wo",
    r"coder\.norm": "coder.final_layer_norm",
}


class T5(Family):
    """T5, and T5 v1.1, which is gated and has an untied head.

    `scalings` has False if transformers' class can leave the decoder's output unscaled, True if it can scale the output.
    """

    free = Family.free | {"sinusoidal_layout", "max_position_embeddings", "position_offset"}
    free |= {"attention_dropout", "activation_dropout"}
    variable_fields = frozenset(("gated_mlp", "logits_scale"))
    module_names = _T5_NAMES
    # A bias of Mesh TensorFlow's checkpoints.
    ignored_prefixes = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

    def __init__(self, name: str, scalings: tuple[bool, ...], **fixed: Any):
        super().__init__(name, _T5_FIELDS, _T5_FIXED | fixed)
        self.scalings = scalings

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        is_scaled = self.scalings[0]
        if len(self.scalings) == 2:
            is_scaled = getattr(theirs, "scale_decoder_outputs", theirs.tie_word_embeddings)
        return {
            "decoder_attention_heads": theirs.num_heads,
            "decoder_ffn_dim": theirs.d_ff,
            "gated_mlp": theirs.is_gated_act,
            "activation_function": theirs.dense_act_fn,
            "logits_scale": theirs.d_model**-0.5 if is_scaled else 1.0,
            "attention_dropout": theirs.dropout_rate,
            "activation_dropout": theirs.dropout_rate,
        }

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        name = ours.activation_function
        # `feed_forward_proj` separates its words by a hyphen, and transformers reads a gated gelu as gelu_new.
        is_expressible = "-" not in name and not (ours.gated_mlp and name == "gelu")
        return {
            "decoder_attention_heads": (ours.encoder_attention_heads,),
            "decoder_ffn_dim": (ours.encoder_ffn_dim,),
            "logits_scale": tuple(ours.hidden_size**-0.5 if is_scaled else 1.0 for is_scaled in self.scalings),
            "activation_function": (name,) if is_expressible else ("relu", "silu", "gelu_new"),
        }

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        is_new_gelu = ours.gated_mlp and ours.activation_function == "gelu_new"
        activation = "gelu" if is_new_gelu else ours.activation_function
        scaling = {"scale_decoder_outputs": ours.logits_scale != 1.0} if len(self.scalings) == 2 else {}
        return {
            "d_kv": ours.stack_sizes("encoder").head_dim,
            "feed_forward_proj": f"gated-{activation}" if ours.gated_mlp else activation,
            # This order matters: the first is the default of the second.
            "tie_word_embeddings": ours.tie_word_embeddings,
            **scaling,
        }

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        theirs = rename(name, self.module_names)
        return Counterpart(theirs if config.gated_mlp else theirs.replace(".wi_1.", ".wi."))


class LongT5(T5):
    """LongT5 with local attention: T5 with windows in the encoder."""

    variable_fields = T5.variable_fields | {"encoder_layer_types"}
    module_names = _T5_NAMES | {r"^encoder(.*)\.SelfAttention": r"encoder\1.LocalSelfAttention"}

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        if theirs.encoder_attention_type != "local":
            raise MetaphraseError(
                f"`encoder_attention_type` of a longt5 must be local, got {theirs.encoder_attention_type!r}: Metaphrase has no "
                "global tokens."
            )
        return super().read_extra_fields(theirs, weights) | encoder_windows(theirs.num_layers, theirs.local_radius)

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        return super().allowed_values(ours) | allowed_windows(ours)

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        radius = {"local_radius": ours.encoder_window[0], "encoder_attention_type": "local"}
        return super().write_extra_fields(ours) | radius

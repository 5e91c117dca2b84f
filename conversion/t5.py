"""T5 (Raffel et al. 2020, arXiv 1910.10683) with T5 v1.1, Flan-T5 and ByT5; mT5; UMT5."""

from collections.abc import Iterator
from typing import Any, ClassVar

from transformers import PreTrainedConfig, UMT5Config

from metaphrase.conversion.family import ENCODER_EMBEDDING, HEAD, Counterpart, Family, Weights
from metaphrase.modeling import MetaphraseConfig

_SUBLAYERS = {
    "encoder": {"self_attn": "SelfAttention", "mlp": "DenseReluDense"},
    "decoder": {"self_attn": "SelfAttention", "cross_attn": "EncDecAttention", "mlp": "DenseReluDense"},
}
_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "down_proj": "wo"}
_GATED = {"gate_proj": "wi_0", "up_proj": "wi_1"}
_PLAIN = {"up_proj": "wi"}
_BIAS = "relative_attention_bias.weight"


class T5(Family):
    """T5, and T5 v1.1, which is gated and has an untied head.

    Attributes:
        scalings: False if transformers' class can leave the decoder's output unscaled, True if it can scale the output.
    """

    name = "t5"
    scalings: ClassVar[tuple[bool, ...]] = (False, True)
    field_names = {
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
    fixed = {
        "position_embedding_type": "relative",
        "relative_attention_shared": True,
        "norm_type": "rmsnorm",
        "norm_position": "pre",
        "final_norm": True,
        "embedding_norm": False,
        "qk_norm": False,
        "scale_embedding": False,
        "attention_scale": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
        "logits_bias": False,
        "share_embeddings": True,
        "decoder_start_from_labels": False,
        "train_padding_embedding": True,
    }
    free = Family.free | {"sinusoidal_layout", "max_position_embeddings", "position_offset"}
    free |= {"attention_dropout", "activation_dropout"}
    # Nothing reads this bias of Mesh TensorFlow's checkpoints.
    ignored = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

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

    def find_obstacles(self, ours: MetaphraseConfig) -> Iterator[str]:
        yield from super().find_obstacles(ours)
        for kind in ("attention_heads", "ffn_dim"):
            encoder, decoder = getattr(ours, f"encoder_{kind}"), getattr(ours, f"decoder_{kind}")
            if encoder != decoder:
                yield f"`encoder_{kind}` must equal `decoder_{kind}`, got {encoder} and {decoder}"
        allowed = [ours.hidden_size**-0.5 if is_scaled else 1.0 for is_scaled in self.scalings]
        if ours.logits_scale not in allowed:
            yield f"`logits_scale` must be {' or '.join(map(str, allowed))}, got {ours.logits_scale}"
        name = ours.activation_function
        if "-" in name or (ours.gated_mlp and name == "gelu"):
            hint = ": transformers reads gated gelu as gelu_new" if name == "gelu" else ""
            yield f"`activation_function` must be one that `feed_forward_proj` can express, got {name}{hint}"

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        is_new_gelu = ours.gated_mlp and ours.activation_function == "gelu_new"
        activation = "gelu" if is_new_gelu else ours.activation_function
        scaling = {"scale_decoder_outputs": ours.logits_scale != 1.0} if len(self.scalings) == 2 else {}
        return {
            "d_kv": ours.get_head_dim(ours.encoder_attention_heads),
            "feed_forward_proj": f"gated-{activation}" if ours.gated_mlp else activation,
            # This order matters: the first is the default of the second.
            "tie_word_embeddings": ours.tie_word_embeddings,
            **scaling,
        }

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        if name == ENCODER_EMBEDDING:
            return Counterpart("shared.weight")
        if name == HEAD:
            return Counterpart(name)
        _, stack, *parts = name.split(".")
        match parts:
            case ["norm", "weight"]:
                return Counterpart(f"{stack}.final_layer_norm.weight")
            case ["position_bias", "embedding", "weight"]:
                return Counterpart(f"{stack}.block.0.layer.0.SelfAttention.{_BIAS}")
            case ["layers", layer, "self_attn", "relative_position_bias", "embedding", "weight"]:
                return Counterpart(f"{stack}.block.{layer}.layer.0.SelfAttention.{_BIAS}")
            case ["layers", layer, sublayer, *rest]:
                is_norm = sublayer.endswith("_norm")
                sublayer = sublayer.removesuffix("_norm")
                prefix = f"{stack}.block.{layer}.layer.{list(_SUBLAYERS[stack]).index(sublayer)}"
                if is_norm:
                    return Counterpart(f"{prefix}.layer_norm.weight")
                names = _PROJECTIONS | (_GATED if config.gated_mlp else _PLAIN)
                return Counterpart(f"{prefix}.{_SUBLAYERS[stack][sublayer]}.{names[rest[0]]}.weight")
        raise AssertionError(name)


class MT5(T5):
    """Multilingual T5 v1.1, whose decoder output transformers never scales.

    Source: Xue et al. 2021, arXiv 2010.11934.
    """

    name = "mt5"
    scalings = (False,)


class UMT5(T5):
    """mT5 with a position bias in each layer.

    transformers always scales the decoder's output before 5.24, and by configuration from 5.24 on.

    Source: Chung et al. 2023, arXiv 2304.09151.
    """

    name = "umt5"
    fixed = T5.fixed | {"relative_attention_shared": False}
    scalings = (False, True) if hasattr(UMT5Config(), "scale_decoder_outputs") else (True,)

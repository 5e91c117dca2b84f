"""Encoder-decoders of two BERTs or two RoBERTas.

Source: Rothe et al. 2020, arXiv 1907.12461; BERT, Devlin et al. 2019, arXiv 1810.04805; RoBERTa, Liu et al. 2019, arXiv
1907.11692.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.families.family import (
    DECODER_EMBEDDING,
    ENCODER_EMBEDDING,
    HEAD,
    HEAD_BIAS,
    SPECIAL_IDS,
    Counterpart,
    Family,
    Weights,
    computed_head_dims,
)
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import STACKS

_SIZES = {"layers": "num_hidden_layers", "attention_heads": "num_attention_heads", "ffn_dim": "intermediate_size"}
# Both stacks have the same values.
_SHARED = {
    "hidden_size": "hidden_size",
    "activation_function": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_FIXED = {
    "position_embedding_type": "learned",
    "norm_type": "layernorm",
    "norm_position": "post",
    "final_norm": False,
    "attention_scale": None,
    "logits_scale": 1.0,
    "train_padding_embedding": False,
}
_FIXED |= dict.fromkeys(("embedding_norm", "attention_bias", "mlp_bias", "logits_bias"), True)
_FIXED |= dict.fromkeys(
    ("gated_mlp", "qk_norm", "scale_embedding", "decoder_start_from_labels", "share_embeddings"), False
)
# These depend on the kind, or on other fields.
_OPEN = ("decoder_max_position_embeddings", "type_vocab_size", "head_transform")
_PARTS = {
    "embed_positions": "embeddings.position_embeddings",
    "embed_positions.token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
for _ours, _theirs in (("self_attn", "attention"), ("cross_attn", "crossattention")):
    _PARTS |= {f"{_ours}.{name[0]}_proj": f"{_theirs}.self.{name}" for name in ("query", "key", "value")}
    _PARTS |= {f"{_ours}.o_proj": f"{_theirs}.output.dense", f"{_ours}_norm": f"{_theirs}.output.LayerNorm"}
# Where the decoder and the head of each kind are, and the names of the dense layer and of the norm in the head.
_KINDS = {
    "bert": ("decoder.bert", "decoder.cls.predictions", "transform.dense", "transform.LayerNorm"),
    "roberta": ("decoder.roberta", "decoder.lm_head", "dense", "layer_norm"),
    # Has neither types nor dense layer.
    "bert-generation": ("decoder.bert", "decoder.lm_head", "", ""),
}


class EncoderDecoder(Family):
    """An encoder and a decoder of one kind: BERT, RoBERTa or BERT for generation."""

    free = Family.free | {"activation_dropout", "sinusoidal_layout", "relative_attention_shared"}
    free |= {"relative_attention_num_buckets", "relative_attention_max_distance"}
    # The class of a sequence is of no use here.
    ignored_prefixes = ("encoder.pooler.",)

    def __init__(self, kind: str = "bert"):
        fields = {f"{stack}_{size}": f"{stack}.{name}" for stack in STACKS for size, name in _SIZES.items()}
        fields |= {"vocab_size": "encoder.vocab_size", "decoder_vocab_size": "decoder.vocab_size"}
        fields |= {ours: f"encoder.{theirs}" for ours, theirs in _SHARED.items()}
        super().__init__("encoder-decoder", fields, _FIXED)
        for field in _OPEN:
            del self.fixed[field]
        self.kind = kind
        decoder, head, *_ = _KINDS[kind]
        self.paths = {"encoder": "encoder", "decoder": decoder}
        source, target = (f"{path}.embeddings.word_embeddings.weight" for path in self.paths.values())
        self.embedding_names = {
            ENCODER_EMBEDDING: (source, source),
            DECODER_EMBEDDING: (target, f"{head}.decoder.weight"),
            HEAD: (f"{head}.decoder.weight", target),
            HEAD_BIAS: (f"{head}.decoder.bias", f"{head}.bias"),
        }

    def of_model(self, config: Mapping[str, Any]) -> "EncoderDecoder":
        if "encoder" not in config:
            has_offset = config.get("position_offset", 0) > 0
            kind = ("roberta" if has_offset else "bert") if config.get("head_transform") else "bert-generation"
            return EncoderDecoder(kind)
        kinds = [config[stack].get("model_type") for stack in STACKS]
        if kinds[0] != kinds[1] or kinds[0] not in _KINDS:
            raise ValueError(
                f"`model_type` of both stacks of an encoder-decoder must be the same, one of {', '.join(_KINDS)}, "
                f"got {kinds[0]} and {kinds[1]}."
            )
        return EncoderDecoder(kinds[0])

    def _position_offset(self, start: int | None, padding: int | None) -> int:
        """Return the row of the first position. RoBERTa's table begins with rows for padding."""
        if self.kind != "roberta":
            return 0
        self.refuse_leading_padding(start, padding)
        return (padding or 0) + 1

    def _read_ties(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, bool]:
        return super()._read_ties(theirs.decoder, weights)

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        encoder, decoder = theirs.encoder, theirs.decoder
        for name in (*_SHARED.values(), "type_vocab_size", "pad_token_id"):
            values = getattr(encoder, name, None), getattr(decoder, name, None)
            if values[0] != values[1]:
                raise ValueError(
                    f"`{name}` must be the same in both stacks of an {self.name}, got {values[0]} and {values[1]}."
                )
        if theirs.pad_token_id not in (None, encoder.pad_token_id):
            raise ValueError(
                f"`pad_token_id` must be the same inside and outside of the stacks, got {encoder.pad_token_id} and "
                f"{theirs.pad_token_id}."
            )
        if self.kind == "roberta" and encoder.hidden_act != "gelu":
            raise ValueError(f"`hidden_act` of a roberta must be gelu, as in its head, got {encoder.hidden_act!r}.")
        offset = self._position_offset(theirs.decoder_start_token_id, encoder.pad_token_id)
        ids = {name: getattr(decoder, name) for name in SPECIAL_IDS[:3] if getattr(theirs, name, None) is None}
        return ids | {
            "position_offset": offset,
            "max_position_embeddings": encoder.max_position_embeddings - offset,
            "decoder_max_position_embeddings": decoder.max_position_embeddings - offset,
            "type_vocab_size": getattr(encoder, "type_vocab_size", None),
            "head_transform": self.kind != "bert-generation",
            "initializer_range": encoder.initializer_range,
        }

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        allowed: dict[str, tuple] = {
            "head_dim": computed_head_dims(ours),
            "position_offset": (self._position_offset(ours.decoder_start_token_id, ours.pad_token_id),),
        }
        if self.kind == "roberta":
            allowed["activation_function"] = ("gelu",)
        if (ours.type_vocab_size is None) == ours.head_transform:
            allowed["type_vocab_size"] = ("a number",) if ours.head_transform else (None,)
        return allowed

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        ties = {"tie_word_embeddings": ours.tie_word_embeddings}
        values = {name: getattr(ours, field) for field, name in _SHARED.items()} | ties | {"model_type": self.kind}
        values |= {name: getattr(ours, name) for name in SPECIAL_IDS[:3]}
        for field in ("initializer_range", "type_vocab_size"):
            if getattr(ours, field) is not None:
                values[field] = getattr(ours, field)
        fields = ties | dict.fromkeys(("decoder.is_decoder", "decoder.add_cross_attention"), True)
        for stack in STACKS:
            rows = ours.stack_sizes(stack).max_position_embeddings + ours.position_offset
            fields |= {f"{stack}.{name}": value for name, value in (values | {"max_position_embeddings": rows}).items()}
        return fields

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        module, parameter = name.rsplit(".", 1)
        if module.startswith("head_transform."):
            _, head, dense, norm = _KINDS[self.kind]
            return Counterpart(f"{head}.{dense if module.endswith('dense') else norm}.{parameter}")
        _, stack, *parts = module.split(".")
        path = self.paths[stack]
        if parts[0] == "layers":
            path, parts = f"{path}.encoder.layer.{parts[1]}", parts[2:]
        return Counterpart(f"{path}.{_PARTS['.'.join(parts)]}.{parameter}")

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        return torch.zeros(shape) if name.startswith(self.ignored_prefixes) else None

"""T5, BART and their relatives, whose configurations hold both stacks.

Source: T5, Raffel et al. 2020, arXiv 1910.10683; mT5, Xue et al. 2021, arXiv 2010.11934; UMT5, Chung et al. 2023, arXiv
2304.09151; LongT5, Guo et al. 2022, arXiv 2112.07916; BART, Lewis et al. 2020, arXiv 1910.13461; mBART, Liu et al. 2020, arXiv
2001.08210; PLBart, Ahmad et al. 2021, arXiv 2103.06333; Marian, Junczys-Dowmunt et al. 2018, arXiv 1804.00344; Pegasus, Zhang
et al. 2020, arXiv 1912.08777; FSMT, Ng et al. 2019, arXiv 1907.06616; M2M100, Fan et al. 2021, arXiv 2010.11125; NLLB Team
2022, arXiv 2207.04672; Blenderbot, Roller et al. 2021, arXiv 2004.13637; MVP, Tang et al. 2023, arXiv 2206.12131; LED, Beltagy
et al. 2020, arXiv 2004.05150.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.families import family
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import STACKS
from metaphrase.modeling.positions import sinusoids
from metaphrase.storage.weight_files import WeightFiles

logger = logging.getLogger(__name__)

_T5_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "head_dim": "d_kv",
    "norm_eps": "layer_norm_epsilon",
}
_T5_FIELDS |= {"encoder_layers": "num_layers", "decoder_layers": "num_decoder_layers"}
_T5_FIELDS |= dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), "num_heads")
_T5_FIELDS |= dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), "d_ff")
_T5_FIELDS |= {f"relative_attention_{name}": f"relative_attention_{name}" for name in ("num_buckets", "max_distance")}
# The last is written, and the others are free.
_T5_FIELDS |= dict.fromkeys(("attention_dropout", "activation_dropout", "dropout"), "dropout_rate")
_T5_FIXED = {"position_embedding_type": "relative", "relative_attention_shared": True, "norm_type": "rmsnorm"}
_T5_FIXED |= {"norm_position": "pre", "final_norm": True, "attention_scale": 1.0, "share_embeddings": True}
_T5_FIXED |= {"train_padding_embedding": True}
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


class T5(family.Family):
    """T5, and T5 v1.1, which is gated and has an untied head.

    `scalings` has False if transformers' class can leave the decoder's output unscaled, True if it can scale the output.
    """

    free = family.Family.free | {"sinusoidal_layout", "max_position_embeddings", "position_offset"}
    free |= {"attention_dropout", "activation_dropout"}
    variable_fields = frozenset(("gated_mlp", "logits_scale"))
    module_names = _T5_NAMES
    # A bias of Mesh TensorFlow's checkpoints.
    ignored_prefixes = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

    def __init__(self, name: str, scalings: tuple[bool, ...], **fixed: Any):
        super().__init__(name, _T5_FIELDS, _T5_FIXED | fixed)
        self.scalings = scalings

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, Any]:
        is_scaled = self.scalings[0]
        if len(self.scalings) == 2:
            is_scaled = getattr(theirs, "scale_decoder_outputs", theirs.tie_word_embeddings)
        return {
            "gated_mlp": theirs.is_gated_act,
            "activation_function": theirs.dense_act_fn,
            "logits_scale": theirs.d_model**-0.5 if is_scaled else 1.0,
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

    def counterpart(self, name: str, config: MetaphraseConfig) -> family.Counterpart:
        theirs = family.rename(name, self.module_names)
        return family.Counterpart(theirs if config.gated_mlp else theirs.replace(".wi_1.", ".wi."))


class LongT5(T5):
    """LongT5 with local attention: T5 with windows in the encoder."""

    has_windows = True
    variable_fields = T5.variable_fields | {"encoder_layer_types"}
    module_names = _T5_NAMES | {r"^encoder(.*)\.SelfAttention": r"encoder\1.LocalSelfAttention"}

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, Any]:
        if theirs.encoder_attention_type != "local":
            kind = theirs.encoder_attention_type
            raise MetaphraseError(f"`encoder_attention_type` must be local, without global tokens, got {kind!r}.")
        windows = family.encoder_windows(theirs.num_layers, theirs.local_radius)
        return super().read_extra_fields(theirs, weights) | windows

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        radius = {"local_radius": ours.encoder_window[0], "encoder_attention_type": "local"}
        return super().write_extra_fields(ours) | radius


_FSMT_HEAD = "model.decoder.output_projection.weight"
_TABLES = tuple(f"model.{stack}.embed_positions.weight" for stack in STACKS)
_SAME = ["vocab_size", "max_position_embeddings", "activation_function", "scale_embedding"]
_SAME += ["dropout", "attention_dropout", "activation_dropout"]
_SAME += [f"{stack}_{size}" for stack in STACKS for size in ("layers", "attention_heads", "ffn_dim")]
_BART_FIELDS = {"hidden_size": "d_model", **dict(zip(_SAME, _SAME, strict=True))}
_BART_FIXED = {"norm_type": "layernorm", "norm_position": "post", "norm_eps": 1e-5}
_BART_FIXED |= {"attention_bias": True, "mlp_bias": True}
_BART_NAMES = {
    r"\.mlp\.": ".",
    "up_proj": "fc1",
    "down_proj": "fc2",
    "o_proj": "out_proj",
    "attn_norm": "attn_layer_norm",
    "cross_attn": "encoder_attn",
    "mlp_norm": "final_layer_norm",
    "embedding_norm": "layernorm_embedding",
    r"coder\.norm": "coder.layer_norm",
}


class Bart(family.Family):
    """BART and its relatives: biases everywhere, and learned or sinusoidal positions.

    Attributes:
        layout: `sinusoidal_layout` of a family without an embedding norm, whose checkpoints with any other table become learned
            positions; None for learned positions and an embedding norm.
        offset: Row of the first learned position.
        reads_table: True if the class reads the table of positions from a checkpoint.
    """

    prefix = "model."
    free = family.Family.free | family.RELATIVE_FIELDS
    variable_fields = frozenset(("logits_bias",))
    module_names = _BART_NAMES
    # A class that computes its sinusoids does not read those of a checkpoint.
    ignored_prefixes = ("model.encoder.version", "model.decoder.version", family.LOGITS_BIAS, *_TABLES)

    def __init__(
        self,
        name: str,
        layout: str | None = None,
        *,
        offset: int = 2,
        fixed: Mapping[str, Any] | None = None,
        field_names: Mapping[str, str] | None = None,
        reads_table: bool = True,
    ):
        positions = {"embedding_norm": layout is None} | ({} if layout else {"position_embedding_type": "learned"})
        super().__init__(name, _BART_FIELDS | (field_names or {}), _BART_FIXED | positions | (fixed or {}))
        self.layout, self.offset, self.reads_table = layout, offset, reads_table
        # Most classes have a constant bias on the logits.
        self.has_logits_bias = "logits_bias" not in self.fixed
        if name == "fsmt":
            # transformers 4 omits a decoder embedding tied to the projection, and keeps the encoder's if all three are tied.
            self.embedding_names = {
                family.ENCODER_EMBEDDING: (family.ENCODER_EMBEDDING, family.DECODER_EMBEDDING, _FSMT_HEAD),
                family.DECODER_EMBEDDING: (family.DECODER_EMBEDDING, _FSMT_HEAD, family.ENCODER_EMBEDDING),
                family.HEAD: (_FSMT_HEAD, family.DECODER_EMBEDDING, family.ENCODER_EMBEDDING),
            }

    def _position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        if self.layout == "fairseq":
            return self.offset_behind_padding(config.decoder_start_token_id, config.pad_token_id)
        return self.offset if self.layout is None else 0

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, Any]:
        if getattr(theirs, "use_prompt", False):
            raise MetaphraseError("`use_prompt` must be false for mvp, got true: Metaphrase has no prompts.")
        offset = self._position_offset(theirs)
        fields: dict[str, Any] = {"position_offset": offset, "initializer_range": theirs.init_std}
        if self.has_logits_bias and family.LOGITS_BIAS in weights.kinds:
            fields["logits_bias"] = bool((weights.read(family.LOGITS_BIAS) != 0).any())
        if self.layout is None:
            return fields
        fields |= {"position_embedding_type": "sinusoidal", "sinusoidal_layout": self.layout}
        for table in (weights.read(name) for name in _TABLES if name in weights.kinds and self.reads_table):
            expected = sinusoids(torch.arange(len(table)), table.shape[1], self.layout)[offset:].to(table.dtype)
            if not torch.allclose(table[offset:], expected, rtol=0, atol=4 * torch.finfo(table.dtype).eps):
                fields["position_embedding_type"] = "learned"
                fields["max_position_embeddings"] = len(table) - offset
        return fields

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        allowed: dict[str, tuple] = {}
        if "decoder_vocab_size" not in self.field_names:
            allowed["decoder_vocab_size"] = (ours.vocab_size,)
        if self.layout is not None:
            allowed["position_embedding_type"] = ("sinusoidal", "learned") if self.reads_table else ("sinusoidal",)
        offset = self._position_offset(ours)
        if ours.position_embedding_type == "sinusoidal":
            return allowed | {"sinusoidal_layout": (self.layout,), "position_offset": (offset,)}
        # Without an offset the table gets unused rows in front.
        return allowed | {"position_offset": (0, offset)}

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        std = 0.02 if ours.initializer_range is None else ours.initializer_range
        fields = {"init_std": std, "tie_word_embeddings": ours.tie_word_embeddings}
        if self.name == "marian":
            return fields | {"share_encoder_decoder_embeddings": ours.share_embeddings}
        # Their class ties all three embeddings or none.
        fields["tie_word_embeddings"] &= ours.share_embeddings
        return fields

    def counterpart(self, name: str, config: MetaphraseConfig) -> family.Counterpart:
        if name == family.HEAD_BIAS:
            return family.Counterpart(family.LOGITS_BIAS, is_row=True)
        if name in _TABLES:
            unused_rows = self._position_offset(config) - config.position_offset
            return family.Counterpart(family.rename(name, self.module_names), unused_rows=unused_rows)
        return super().counterpart(name, config)

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor:
        if name not in _TABLES:
            return super().make_weight(name, shape, config)
        table = sinusoids(torch.arange(shape[0]), shape[1], self.layout)
        if config.position_offset:
            # fairseq's row for padding.
            table[config.pad_token_id] = 0
        return table


class LED(Bart):
    """LED without global attention: BART with windows in the encoder, and a number of positions for each stack."""

    prefix = "led."
    has_windows = True
    # The paper (section 3.1) also initializes the projections of global attention as copies.
    copy_name = ("_global.", ".")
    variable_fields = Bart.variable_fields | {"encoder_layer_types", "decoder_max_position_embeddings"}
    module_names = _BART_NAMES | {
        "^model": "led",
        r"^led\.encoder(.*)self_attn\.out_proj": r"led.encoder\1self_attn.output",
        **{
            rf"^led\.encoder(.*)self_attn\.{name[0]}_proj": rf"led.encoder\1self_attn.longformer_self_attn.{name}"
            for name in ("query", "key", "value")
        },
    }

    def __init__(self):
        positions = {"max_position_embeddings": "max_encoder_position_embeddings"}
        super().__init__("led", offset=0, fixed={"scale_embedding": False}, field_names=positions)
        del self.field_names["scale_embedding"]

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: WeightFiles) -> dict[str, Any]:
        windows = theirs.attention_window
        window, *rest = {*windows} if isinstance(windows, list) else (windows,)
        if rest:
            raise MetaphraseError(f"`attention_window` of a led must be the same in all layers, got {windows}.")
        logger.warning("The projections of global attention are left behind: Metaphrase has windows alone.")
        return super().read_extra_fields(theirs, weights) | {
            "decoder_max_position_embeddings": theirs.max_decoder_position_embeddings,
            **family.encoder_windows(theirs.encoder_layers, window // 2),
        }

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        return super().write_extra_fields(ours) | {
            "attention_window": 2 * ours.encoder_window[0],
            "max_decoder_position_embeddings": ours.stack_sizes("decoder").max_position_embeddings,
        }

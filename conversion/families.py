"""Families: encoder-decoders with classes of their own in transformers, and how each maps to Metaphrase.

"Ours" is Metaphrase's side, "theirs" is the family's. A family is a row of `FAMILIES`: names of fields, fixed fields, and quirks.

Source: T5, Raffel et al. 2020, arXiv 1910.10683; mT5, Xue et al. 2021, arXiv 2010.11934; UMT5, Chung et al. 2023, arXiv
2304.09151; BART, Lewis et al. 2020, arXiv 1910.13461; mBART, Liu et al. 2020, arXiv 2001.08210; PLBart, Ahmad et al. 2021, arXiv
2103.06333; Marian, Junczys-Dowmunt et al. 2018, arXiv 1804.00344; Pegasus, Zhang et al. 2020, arXiv 1912.08777; FSMT, Ng et al.
2019, arXiv 1907.06616; M2M100, Fan et al. 2021, arXiv 2010.11125; NLLB Team 2022, arXiv 2207.04672.
"""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, UMT5Config

from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.positions import sinusoids
from metaphrase.storage.weight_files import Kind, WeightFiles

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
ENCODER_EMBEDDING = "model.encoder.embed_tokens.weight"
DECODER_EMBEDDING = "model.decoder.embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
_LOGITS_BIAS = "final_logits_bias"
_FSMT_HEAD = "model.decoder.output_projection.weight"
_TABLES = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))


class Weights:
    """Weights of a family's checkpoint by their names in the class with a head, even if the checkpoint has no head."""

    def __init__(self, files: WeightFiles, prefix: str):
        self._files = files
        has_prefix = any(name.startswith(prefix) for name in files.kinds)
        self.names = {
            name if has_prefix or name.startswith(("lm_head.", _LOGITS_BIAS)) else prefix + name: name
            for name in files.kinds
        }

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(self.names[name])

    def kind(self, name: str) -> Kind:
        return self._files.kinds[self.names[name]]


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


class Family(abc.ABC):
    """Mapping of a family's configuration and weights.

    Attributes:
        field_names: Our field to the family's field of the same meaning.
        fixed: Our field to its only value in this family.
        free: Our fields that do not change what a trained model computes.
        prefix: Prefix of all weights but the head's, which a checkpoint without a head may lack.
        embedding_names: For each of our three embeddings the family's names, most specific first. A missing one is tied to the
            next.
    """

    prefix = ""
    free = frozenset(
        ("initializer_range", "use_cache", "is_encoder_decoder", "train_padding_embedding", "rope_parameters")
    )

    def __init__(
        self, name: str, field_names: Mapping[str, str], fixed: Mapping[str, Any], ignored: tuple[str, ...] = ()
    ):
        self.name, self.field_names, self.fixed, self.ignored = name, field_names, fixed, ignored
        names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        shared, encoder, decoder = (self.prefix + embedding for embedding in names)
        self.embedding_names = {
            ENCODER_EMBEDDING: (encoder, shared, decoder, HEAD),
            DECODER_EMBEDDING: (decoder, shared, encoder, HEAD),
            HEAD: (HEAD, decoder, shared, encoder),
        }

    def read_config(self, theirs: PreTrainedConfig, weights: Weights) -> MetaphraseConfig:
        """Return our configuration of a checkpoint, whose weights show what is tied and what a bias holds."""
        fields = {ours: getattr(theirs, name) for ours, name in self.field_names.items()}
        # Not every family declares every id.
        fields |= {name: getattr(theirs, name, None) for name in SPECIAL_IDS}
        fields |= self.fixed
        fields |= self._read_ties(theirs, weights)
        return MetaphraseConfig(dtype=theirs.dtype, **(fields | self.read_extra_fields(theirs, weights)))

    def embedding_name(self, ours: str, weights: Weights) -> str:
        """Return the first existing name of one of our three embeddings."""
        names = self.embedding_names[ours]
        return next((name for name in names if name in weights), names[0])

    def _read_ties(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, bool]:
        source, target, head = (
            self.embedding_name(name, weights) for name in (ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)
        )

        # transformers does not tie two weights that differ, whatever the configuration says.
        def are_tied(first: str, second: str, may_tie: bool) -> bool:
            return first == second or (may_tie and _are_equal(weights.read(first), weights.read(second)))

        may_share = theirs.tie_word_embeddings and getattr(theirs, "share_encoder_decoder_embeddings", True)
        return {
            "share_embeddings": are_tied(source, target, may_share),
            "tie_word_embeddings": are_tied(head, target, theirs.tie_word_embeddings),
        }

    def write_config(self, ours: MetaphraseConfig) -> dict[str, Any]:
        """Return the fields of the family's configuration for one of our models. An error names all options in the way."""
        heads = (ours.encoder_attention_heads, ours.decoder_attention_heads)
        allowed = {field: (value,) for field, value in self.fixed.items() if field not in self.free}
        allowed["num_key_value_heads"] = (None, heads[0]) if heads[0] == heads[1] else (None,)
        head_dims = {ours.get_head_dim(count) for count in heads}
        if allowed.get("attention_scale") == (None,) and len(head_dims) == 1:
            allowed["attention_scale"] = (None, head_dims.pop() ** -0.5)
        allowed |= self.allowed_values(ours)
        obstacles = [
            f"`{field}` must be {' or '.join(map(str, values))}, got {getattr(ours, field)}"
            for field, values in allowed.items()
            if getattr(ours, field) not in values
        ]
        if obstacles:
            raise ValueError(f"The model is no {self.name}: " + "; ".join(obstacles) + ".")
        fields = {name: getattr(ours, field) for field, name in self.field_names.items()}
        fields |= {name: getattr(ours, name) for name in SPECIAL_IDS}
        if ours.decoder_start_token_id is None:
            # Not every family allows None.
            del fields["decoder_start_token_id"]
        return fields | self.write_extra_fields(ours)

    @abc.abstractmethod
    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        """Return our fields that no single field of theirs holds."""

    @abc.abstractmethod
    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        """Return their fields that no single field of ours holds."""

    @abc.abstractmethod
    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        """Return the values that fields may have, for those that are not fixed and depend on other fields."""

    @abc.abstractmethod
    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        """Return the family's weight for one of ours."""

    def ignorable_weights(self, config: MetaphraseConfig) -> set[str]:
        """Return their weights that follow from our configuration."""
        return set(self.ignored)

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        """Make a weight of theirs that has no counterpart of ours, or return None for any other weight."""
        return None


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


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
} | dict.fromkeys(
    (
        *("embedding_norm", "qk_norm", "scale_embedding", "attention_bias", "mlp_bias", "logits_bias"),
        "decoder_start_from_labels",
    ),
    False,
)
_T5_SUBLAYERS = {
    "encoder": {"self_attn": "SelfAttention", "mlp": "DenseReluDense"},
    "decoder": {"self_attn": "SelfAttention", "cross_attn": "EncDecAttention", "mlp": "DenseReluDense"},
}
_T5_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "down_proj": "wo", "gate_proj": "wi_0"}
_T5_BIAS = "relative_attention_bias.weight"


class T5(Family):
    """T5, and T5 v1.1, which is gated and has an untied head.

    `scalings` has False if transformers' class can leave the decoder's output unscaled, True if it can scale the output.
    """

    free = Family.free | {"sinusoidal_layout", "max_position_embeddings", "position_offset"}
    free |= {"attention_dropout", "activation_dropout"}

    def __init__(self, name: str, scalings: tuple[bool, ...], **fixed: Any):
        # Nothing reads this bias of Mesh TensorFlow's checkpoints.
        ignored = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
        super().__init__(name, _T5_FIELDS, _T5_FIXED | fixed, ignored)
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
            "d_kv": ours.get_head_dim(ours.encoder_attention_heads),
            "feed_forward_proj": f"gated-{activation}" if ours.gated_mlp else activation,
            # This order matters: the first is the default of the second.
            "tie_word_embeddings": ours.tie_word_embeddings,
            **scaling,
        }

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        if name in (ENCODER_EMBEDDING, HEAD):
            return Counterpart("shared.weight" if name == ENCODER_EMBEDDING else name)
        _, stack, *parts = name.split(".")
        if parts[0] == "norm":
            return Counterpart(f"{stack}.final_layer_norm.weight")
        if "embedding" in parts:
            layer = parts[1] if parts[0] == "layers" else 0
            return Counterpart(f"{stack}.block.{layer}.layer.0.SelfAttention.{_T5_BIAS}")
        _, layer, sublayer, *rest = parts
        sublayers = _T5_SUBLAYERS[stack]
        prefix = f"{stack}.block.{layer}.layer.{list(sublayers).index(sublayer.removesuffix('_norm'))}"
        if sublayer.endswith("_norm"):
            return Counterpart(f"{prefix}.layer_norm.weight")
        names = _T5_PROJECTIONS | {"up_proj": "wi_1" if config.gated_mlp else "wi"}
        return Counterpart(f"{prefix}.{sublayers[sublayer]}.{names[rest[0]]}.weight")


_BART_FIELDS = {"vocab_size": "vocab_size", "hidden_size": "d_model"} | {
    name: name
    for name in (
        *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "activation_function", "scale_embedding"),
        *("dropout", "attention_dropout", "activation_dropout"),
    )
}
_BART_FIXED = {
    "norm_type": "layernorm",
    "norm_position": "post",
    "norm_eps": 1e-5,
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
_BART_PARTS = {
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
_DEFAULT_INITIALIZER_RANGE = 0.02


class Bart(Family):
    """BART and its relatives: biases everywhere, and learned or sinusoidal positions.

    Attributes:
        layout: `sinusoidal_layout` of a family without an embedding norm, whose checkpoints with any other table become learned
            positions; None for learned positions and an embedding norm.
        reads_table: True if the class reads the table of positions from a checkpoint.
        has_logits_bias: True if the class has a constant bias on the logits.
        has_two_vocabularies: True if source and target may have separate vocabularies.
    """

    prefix = "model."
    free = Family.free | {"relative_attention_num_buckets", "relative_attention_max_distance"}
    free |= {"relative_attention_shared"}

    def __init__(
        self,
        name: str,
        layout: str | None = None,
        *,
        fixed: Mapping[str, Any] | None = None,
        field_names: Mapping[str, str] | None = None,
        reads_table: bool = True,
        has_logits_bias: bool = True,
        has_two_vocabularies: bool = False,
    ):
        positions = {"embedding_norm": layout is None} | ({} if layout else {"position_embedding_type": "learned"})
        ignored = ("model.encoder.version", "model.decoder.version")
        # A class that computes its sinusoids does not read those of a checkpoint.
        ignored += () if reads_table else tuple(f"{name}s" for name in _TABLES)
        super().__init__(name, _BART_FIELDS | (field_names or {}), _BART_FIXED | positions | (fixed or {}), ignored)
        self.layout, self.reads_table = layout, reads_table
        self.has_logits_bias, self.has_two_vocabularies = has_logits_bias, has_two_vocabularies
        if name == "fsmt":
            # transformers 4 omits a decoder embedding tied to the projection, and keeps the encoder's if all three are tied.
            self.embedding_names = {
                ENCODER_EMBEDDING: (ENCODER_EMBEDDING, DECODER_EMBEDDING, _FSMT_HEAD),
                DECODER_EMBEDDING: (DECODER_EMBEDDING, _FSMT_HEAD, ENCODER_EMBEDDING),
                HEAD: (_FSMT_HEAD, DECODER_EMBEDDING, ENCODER_EMBEDDING),
            }

    def _position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        """Return the row of the first position: fairseq's tables begin with rows for padding."""
        if self.layout is None:
            return 2
        return (config.pad_token_id or 0) + 1 if self.layout == "fairseq" else 0

    def _refuse_leading_padding(self, config: PreTrainedConfig | MetaphraseConfig) -> None:
        start = config.decoder_start_token_id
        if self.layout == "fairseq" and start is not None and start == config.pad_token_id:
            raise ValueError(
                f"`decoder_start_token_id` must not be `pad_token_id`, which has no position in a {self.name}, "
                f"got {start} for both."
            )

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        self._refuse_leading_padding(theirs)
        offset = self._position_offset(theirs)
        fields: dict[str, Any] = {"position_offset": offset}
        fields["initializer_range"] = _DEFAULT_INITIALIZER_RANGE if theirs.init_std is None else theirs.init_std
        if self.has_logits_bias and _LOGITS_BIAS in weights:
            fields["logits_bias"] = bool((weights.read(_LOGITS_BIAS) != 0).any())
        if self.layout is None:
            return fields
        fields |= {"position_embedding_type": "sinusoidal", "sinusoidal_layout": self.layout}
        tables = [weights.read(name) for name in _TABLES if name in weights and self.reads_table]
        for table in tables:
            expected = sinusoids(torch.arange(len(table)), table.shape[1], self.layout)[offset:].to(table.dtype)
            if not torch.allclose(table[offset:], expected, rtol=0, atol=4 * torch.finfo(table.dtype).eps):
                fields["position_embedding_type"] = "learned"
                fields["max_position_embeddings"] = len(table) - offset
        return fields

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        self._refuse_leading_padding(ours)
        # The width of a head that is given must be the one that their class computes.
        heads = {ours.encoder_attention_heads, ours.decoder_attention_heads}
        allowed: dict[str, tuple] = {"head_dim": (None, ours.hidden_size / heads.pop()) if len(heads) == 1 else (None,)}
        if not self.has_logits_bias:
            allowed["logits_bias"] = (False,)
        if not self.has_two_vocabularies:
            allowed["decoder_vocab_size"] = (ours.vocab_size,)
        if self.layout is not None:
            allowed["position_embedding_type"] = ("sinusoidal", "learned") if self.reads_table else ("sinusoidal",)
        offset = self._position_offset(ours)
        if ours.position_embedding_type == "sinusoidal":
            return allowed | {"sinusoidal_layout": (self.layout,), "position_offset": (offset,)}
        # Without an offset the table gets unused rows in front.
        return allowed | {"position_offset": (0, offset)}

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        std = _DEFAULT_INITIALIZER_RANGE if ours.initializer_range is None else ours.initializer_range
        if self.name == "marian":
            ties = {"tie_word_embeddings": ours.tie_word_embeddings}
            return {"init_std": std, "share_encoder_decoder_embeddings": ours.share_embeddings} | ties
        # Their class ties all three embeddings or none.
        return {"init_std": std, "tie_word_embeddings": ours.tie_word_embeddings and ours.share_embeddings}

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        if name == HEAD_BIAS:
            return Counterpart(_LOGITS_BIAS, is_row=True)
        if name in _TABLES:
            return Counterpart(name, unused_rows=self._position_offset(config) - config.position_offset)
        return Counterpart(".".join(_BART_PARTS.get(part, part) for part in name.split(".") if part != "mlp"))

    def ignorable_weights(self, config: MetaphraseConfig) -> set[str]:
        ignored = super().ignorable_weights(config)
        if self.has_logits_bias and not config.logits_bias:
            ignored.add(_LOGITS_BIAS)
        return ignored | (set(_TABLES) if config.position_embedding_type == "sinusoidal" else set())

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        if name == _LOGITS_BIAS:
            return torch.zeros(shape)
        if name not in _TABLES:
            return None
        table = sinusoids(torch.arange(shape[0]), shape[1], self.layout)
        if config.position_offset:
            # fairseq's row for padding.
            table[config.pad_token_id] = 0
        return table


_PRE_NORM = {"norm_position": "pre", "final_norm": True}
# A target ends with its language code, and training starts the decoder with that code.
_LANGUAGE_FIRST = {"decoder_start_from_labels": True}
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        T5("t5", (False, True)),
        # transformers never scales the decoder's output of mT5. It always scales UMT5's before 5.24.
        T5("mt5", (False,)),
        T5(
            "umt5",
            (False, True) if hasattr(UMT5Config(), "scale_decoder_outputs") else (True,),
            relative_attention_shared=False,
        ),
        Bart("bart"),
        Bart("mbart", fixed=_PRE_NORM | _LANGUAGE_FIRST),
        Bart("plbart", fixed=_LANGUAGE_FIRST),
        Bart("pegasus", "half_split", fixed=_PRE_NORM),
        Bart(
            "marian",
            "half_split",
            field_names={"decoder_vocab_size": "decoder_vocab_size"},
            has_two_vocabularies=True,
        ),
        # Also NLLB. The class computes fairseq's sinusoids and never reads them.
        Bart("m2m_100", "fairseq", fixed=_PRE_NORM, reads_table=False, has_logits_bias=False),
        # fairseq's WMT19 models.
        Bart(
            "fsmt",
            "fairseq",
            fixed=_LANGUAGE_FIRST,
            field_names={"vocab_size": "src_vocab_size", "decoder_vocab_size": "tgt_vocab_size"},
            has_logits_bias=False,
            has_two_vocabularies=True,
        ),
    )
}

"""BART and its relatives.

Source: BART, Lewis et al. 2020, arXiv 1910.13461; mBART, Liu et al. 2020, arXiv 2001.08210; PLBart, Ahmad et al. 2021, arXiv
2103.06333; Marian, Junczys-Dowmunt et al. 2018, arXiv 1804.00344; Pegasus, Zhang et al. 2020, arXiv 1912.08777; FSMT, Ng et al.
2019, arXiv 1907.06616; M2M100, Fan et al. 2021, arXiv 2010.11125; NLLB Team 2022, arXiv 2207.04672; Blenderbot, Roller et al.
2021, arXiv 2004.13637; MVP, Tang et al. 2023, arXiv 2206.12131; LED, Beltagy et al. 2020, arXiv 2004.05150.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from metaphrase.conversion.families.family import (
    DECODER_EMBEDDING,
    ENCODER_EMBEDDING,
    HEAD,
    HEAD_BIAS,
    LOGITS_BIAS,
    RELATIVE_FIELDS,
    Counterpart,
    Family,
    Weights,
    allowed_windows,
    encoder_windows,
    rename,
)
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.configuration_metaphrase import STACKS
from metaphrase.modeling.positions import sinusoids

logger = logging.getLogger(__name__)

_FSMT_HEAD = "model.decoder.output_projection.weight"
_TABLES = tuple(f"model.{stack}.embed_positions.weight" for stack in STACKS)
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
    "attention_bias": True,
    "mlp_bias": True,
}
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
_DEFAULT_INITIALIZER_RANGE = 0.02


class Bart(Family):
    """BART and its relatives: biases everywhere, and learned or sinusoidal positions.

    Attributes:
        layout: `sinusoidal_layout` of a family without an embedding norm, whose checkpoints with any other table become learned
            positions; None for learned positions and an embedding norm.
        offset: Row of the first learned position.
        reads_table: True if the class reads the table of positions from a checkpoint.
    """

    prefix = "model."
    free = Family.free | RELATIVE_FIELDS
    variable_fields = frozenset(("logits_bias",))
    module_names = _BART_NAMES
    ignored_prefixes = ("model.encoder.version", "model.decoder.version")

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
        if not reads_table:
            # A class that computes its sinusoids does not read those of a checkpoint.
            self.ignored_prefixes += tuple(f"{table}s" for table in _TABLES)
        self.layout, self.offset, self.reads_table = layout, offset, reads_table
        # Most classes have a constant bias on the logits.
        self.has_logits_bias = "logits_bias" not in self.fixed
        if name == "fsmt":
            # transformers 4 omits a decoder embedding tied to the projection, and keeps the encoder's if all three are tied.
            self.embedding_names = {
                ENCODER_EMBEDDING: (ENCODER_EMBEDDING, DECODER_EMBEDDING, _FSMT_HEAD),
                DECODER_EMBEDDING: (DECODER_EMBEDDING, _FSMT_HEAD, ENCODER_EMBEDDING),
                HEAD: (_FSMT_HEAD, DECODER_EMBEDDING, ENCODER_EMBEDDING),
            }

    def _position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        if self.layout == "fairseq":
            return self.offset_behind_padding(config.decoder_start_token_id, config.pad_token_id)
        return self.offset if self.layout is None else 0

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        if getattr(theirs, "use_prompt", False):
            raise MetaphraseError(
                "`use_prompt` must be false for mvp, got true: prompts are vectors that Metaphrase lacks."
            )
        offset = self._position_offset(theirs)
        fields: dict[str, Any] = {"position_offset": offset}
        fields["initializer_range"] = _DEFAULT_INITIALIZER_RANGE if theirs.init_std is None else theirs.init_std
        if self.has_logits_bias and LOGITS_BIAS in weights:
            fields["logits_bias"] = bool((weights.read(LOGITS_BIAS) != 0).any())
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
        std = _DEFAULT_INITIALIZER_RANGE if ours.initializer_range is None else ours.initializer_range
        if self.name == "marian":
            ties = {"tie_word_embeddings": ours.tie_word_embeddings}
            return {"init_std": std, "share_encoder_decoder_embeddings": ours.share_embeddings} | ties
        # Their class ties all three embeddings or none.
        return {"init_std": std, "tie_word_embeddings": ours.tie_word_embeddings and ours.share_embeddings}

    def counterpart(self, name: str, config: MetaphraseConfig) -> Counterpart:
        if name == HEAD_BIAS:
            return Counterpart(LOGITS_BIAS, is_row=True)
        if name in _TABLES:
            unused_rows = self._position_offset(config) - config.position_offset
            return Counterpart(rename(name, self.module_names), unused_rows=unused_rows)
        return super().counterpart(name, config)

    def ignorable_weights(self, config: MetaphraseConfig) -> set[str]:
        bias = {LOGITS_BIAS} if self.has_logits_bias and not config.logits_bias else set()
        return bias | (set(_TABLES) if config.position_embedding_type == "sinusoidal" else set())

    def make_weight(self, name: str, shape: tuple[int, ...], config: MetaphraseConfig) -> torch.Tensor | None:
        if name == LOGITS_BIAS:
            return torch.zeros(shape)
        if name not in _TABLES:
            return None
        table = sinusoids(torch.arange(shape[0]), shape[1], self.layout)
        if config.position_offset:
            # fairseq's row for padding.
            table[config.pad_token_id] = 0
        return table


class LED(Bart):
    """LED without global attention: BART with windows in the encoder, and a number of positions for each stack."""

    prefix = "led."
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

    def read_extra_fields(self, theirs: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
        windows = theirs.attention_window
        window, *rest = {*windows} if isinstance(windows, list) else (windows,)
        if rest:
            raise MetaphraseError(f"`attention_window` of a led must be the same in all layers, got {windows}.")
        logger.warning("The projections of global attention are left behind: Metaphrase has windows alone.")
        return super().read_extra_fields(theirs, weights) | {
            "decoder_max_position_embeddings": theirs.max_decoder_position_embeddings,
            **encoder_windows(theirs.encoder_layers, window // 2),
        }

    def allowed_values(self, ours: MetaphraseConfig) -> dict[str, tuple]:
        return super().allowed_values(ours) | allowed_windows(ours)

    def write_extra_fields(self, ours: MetaphraseConfig) -> dict[str, Any]:
        return super().write_extra_fields(ours) | {
            "attention_window": 2 * ours.encoder_window[0],
            "max_decoder_position_embeddings": ours.stack_sizes("decoder").max_position_embeddings,
        }

    def original_name(self, name: str) -> str:
        # The paper (section 3.1) also initializes the projections of global attention as copies.
        return name.replace("_global.", ".")

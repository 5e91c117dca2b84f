"""Presets: published encoder-decoder Transformers, and the designs that Metaphrase recommends.

A preset lists the fields that differ from the defaults of `MetaphraseConfig`, in `presets.yaml`.

Source:
- T5: Raffel et al. 2020, section 3.1 and appendix, arXiv 1910.10683.
- T5 v1.1: Shazeer 2020, arXiv 2002.05202, and the released configurations.
- Transformer base and big: Vaswani et al. 2017, table 3, arXiv 1706.03762. Its IWSLT size is fairseq's.
- Transformer tiny: Wu et al. 2021, arXiv 2105.14462.
- BART: Lewis et al. 2020, arXiv 1910.13461.
- Marian: Junczys-Dowmunt et al. 2018, arXiv 1804.00344.
- Metaphrase: a shallow decoder saves decoding time, and a deep encoder keeps the quality (Kasai et al. 2021, arXiv 2006.10369).
- Students: the widths and depths of Bogoychev et al. 2020, Edinburgh's Submissions to the 2020 Machine Translation Efficiency
  Task, https://aclanthology.org/2020.ngt-1.26.
- Metaphrase long: local attention with the radius of LongT5 (Guo et al. 2022, section 3.1, arXiv 2112.07916).
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from metaphrase.errors import MetaphraseError

if TYPE_CHECKING:
    from metaphrase.modeling import MetaphraseConfig

_ROWS = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))["presets"]
PRESETS: dict[str, dict] = {
    name: {
        "hidden_size": hidden_size,
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": ffn_dim,
        "decoder_ffn_dim": ffn_dim,
        **fields,
    }
    for name, (hidden_size, encoder_layers, decoder_layers, heads, ffn_dim, fields) in _ROWS.items()
}


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return list(PRESETS)


def from_preset(cls: "type[MetaphraseConfig]", name: str, **overrides: Any) -> "MetaphraseConfig":
    """Return the configuration of a preset.

    In T5's presets, `logits_scale` follows the final `hidden_size` and `tie_word_embeddings`.

    Args:
        name: One of `presets()`.
        **overrides: Fields that replace those of the preset, such as `vocab_size`.

    Raises:
        MetaphraseError: If the preset or a field is unknown.
    """
    if name not in PRESETS:
        raise MetaphraseError(f"`preset` must be one of {', '.join(PRESETS)}, got {name!r}.")
    overrides = {cls.attribute_map.get(field, field): value for field, value in overrides.items()}
    # A configuration itself takes any name. The types of most fields of the base class are not checked.
    if unknown := overrides.keys() - {*cls.__annotations__, "dtype"}:
        raise MetaphraseError(f"`{min(unknown)}` is not a field of MetaphraseConfig.")
    fields = copy.deepcopy(PRESETS[name]) | overrides
    if fields.get("logits_scale", 1.0) is None:
        is_tied = fields.get("tie_word_embeddings", True)
        fields["logits_scale"] = fields["hidden_size"] ** -0.5 if is_tied else 1.0
    # Marian's decoder starts with zeros, which are the embedding of padding.
    if not PRESETS[name].get("train_padding_embedding", True):
        fields |= {"bos_token_id": None, "decoder_start_token_id": fields.get("pad_token_id", cls.pad_token_id)}
    return cls(**fields)

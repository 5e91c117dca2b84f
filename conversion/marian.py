"""Marian (Junczys-Dowmunt et al. 2018, arXiv 1804.00344; OPUS-MT) and Pegasus (Zhang et al. 2020, arXiv 1912.08777)."""

from typing import Any

from transformers import PreTrainedConfig

from metaphrase.conversion.sinusoidal import Sinusoidal
from metaphrase.modeling import MetaphraseConfig


class Marian(Sinusoidal):
    """Post-norm, with one vocabulary or two."""

    name = "marian"
    config_class = "MarianConfig"
    model_class = "MarianMTModel"
    layout = "half_split"
    same = Sinusoidal.same | {"decoder_vocab_size": "decoder_vocab_size"}
    may_have_two_vocabularies = True

    def ties_embeddings(self, theirs: PreTrainedConfig) -> bool:
        return theirs.tie_word_embeddings and theirs.share_encoder_decoder_embeddings

    def write_options(self, ours: MetaphraseConfig) -> dict[str, Any]:
        return super().write_options(ours) | {
            "tie_word_embeddings": ours.tie_word_embeddings,
            "share_encoder_decoder_embeddings": ours.share_embeddings,
        }


class Pegasus(Sinusoidal):
    """Pre-norm."""

    name = "pegasus"
    config_class = "PegasusConfig"
    model_class = "PegasusForConditionalGeneration"
    layout = "half_split"
    fixed = Sinusoidal.fixed | {"norm_position": "pre", "final_norm": True}

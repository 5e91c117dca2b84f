"""FSMT (Ng et al. 2019, arXiv 1907.06616): fairseq's models of WMT19, with a vocabulary for each language."""

from transformers import PreTrainedConfig

from metaphrase.conversion.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, HEAD
from metaphrase.conversion.sinusoidal import Sinusoidal
from metaphrase.modeling import MetaphraseConfig

_PROJECTION = "model.decoder.output_projection.weight"


class FSMT(Sinusoidal):
    """Post-norm, with fairseq's sinusoids."""

    name = "fsmt"
    config_class = "FSMTConfig"
    model_class = "FSMTForConditionalGeneration"
    layout = "fairseq"
    has_logits_bias = False
    may_have_two_vocabularies = True
    same = Sinusoidal.same | {"vocab_size": "src_vocab_size", "decoder_vocab_size": "tgt_vocab_size"}
    fixed = Sinusoidal.fixed | {"decoder_start_from_labels": True}
    embedding_names = {
        ENCODER_EMBEDDING: (ENCODER_EMBEDDING, DECODER_EMBEDDING, _PROJECTION),
        # transformers 4 left out the embedding that is the projection, too; where all three are one, it kept the encoder's.
        DECODER_EMBEDDING: (DECODER_EMBEDDING, _PROJECTION, ENCODER_EMBEDDING),
        HEAD: (_PROJECTION, DECODER_EMBEDDING, ENCODER_EMBEDDING),
    }

    def position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        return (config.pad_token_id or 0) + 1

"""The families that can be converted, each in a module, by their `model_type`."""

from transformers import UMT5Config

from metaphrase.conversion.families.family import Family
from metaphrase.conversion.families.one_config import LED, T5, Bart, LongT5
from metaphrase.conversion.families.two_stacks import EncoderDecoder, T5Gemma, T5Gemma2

_PRE_NORM = {"norm_position": "pre", "final_norm": True}
# A target ends with its language code, and training starts the decoder with that code.
_LANGUAGE_FIRST = {"decoder_start_from_labels": True}
_NO_BIAS = {"logits_bias": False}
# transformers always scales the decoder's output of UMT5 before 5.24.
_UMT5_SCALINGS = (False, True) if hasattr(UMT5Config(), "scale_decoder_outputs") else (True,)
_FSMT_FIELDS = {"vocab_size": "src_vocab_size", "decoder_vocab_size": "tgt_vocab_size"}
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        T5("t5", (False, True)),
        # transformers never scales the decoder's output of mT5.
        T5("mt5", (False,)),
        T5("umt5", _UMT5_SCALINGS, relative_attention_shared=False),
        LongT5("longt5", (False, True)),
        Bart("bart"),
        Bart("mbart", fixed=_PRE_NORM | _LANGUAGE_FIRST),
        Bart("plbart", fixed=_LANGUAGE_FIRST),
        Bart("blenderbot", offset=0, fixed=_PRE_NORM | {"embedding_norm": False}),
        Bart("blenderbot-small", offset=0, fixed={"embedding_norm_before_positions": True}),
        Bart("mvp"),
        LED(),
        Bart("pegasus", "half_split", fixed=_PRE_NORM),
        Bart("marian", "half_split", field_names={"decoder_vocab_size": "decoder_vocab_size"}),
        # Also NLLB. The class computes fairseq's sinusoids and never reads them.
        Bart("m2m_100", "fairseq", fixed=_PRE_NORM | _NO_BIAS, reads_table=False),
        # fairseq's WMT19 models.
        Bart("fsmt", "fairseq", fixed=_LANGUAGE_FIRST | _NO_BIAS, field_names=_FSMT_FIELDS),
        EncoderDecoder(),
        T5Gemma("t5gemma", share_embeddings=False),
        T5Gemma2(),
    )
}

"""mBART (Liu et al. 2020, arXiv 2001.08210) and PLBart (Ahmad et al. 2021, arXiv 2103.06333)."""

from metaphrase.conversion.bart import Bart


class MBart(Bart):
    """BART pre-norm, with targets that end with the code of their language, which the decoder starts with in training."""

    name = "mbart"
    config_class = "MBartConfig"
    model_class = "MBartForConditionalGeneration"
    fixed = Bart.fixed | {"norm_position": "pre", "final_norm": True, "decoder_start_from_labels": True}


class PLBart(Bart):
    """BART for programming languages, with targets as mBART's."""

    name = "plbart"
    config_class = "PLBartConfig"
    model_class = "PLBartForConditionalGeneration"
    fixed = Bart.fixed | {"decoder_start_from_labels": True}

"""Tiny models of other families with large weights, for the tokenizers of `tiny_pair()`."""

import torch
from tiny_generator import tiny_generator, tiny_pair
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from metaphrase.inference import Generator


def other_model(family: str) -> PreTrainedModel:
    """Return a model of `t5`, `bart`, `marian` or `fsmt`, with the same weights in every call."""
    fields = tiny_pair().config_fields()
    fields.pop("decoder_vocab_size")
    torch.manual_seed(0)
    if family == "t5":
        fields |= {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "initializer_factor": 5.0}
    else:
        fields |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}
        fields |= {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        fields |= {"init_std": 0.5, "forced_eos_token_id": None}
    if family == "fsmt":
        fields |= {
            "langs": ["en", "de"],
            **dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), fields.pop("vocab_size")),
        }
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **fields)).eval()


def generator_of(family: str, **options) -> Generator:
    """Return a tiny generator of `metaphrase` (one vocabulary), `two vocabularies`, or another family."""
    if family in ("metaphrase", "two vocabularies"):
        return tiny_generator(joint=family == "metaphrase", **options)
    return Generator(other_model(family), tiny_pair(), **options)


def calmer(generator: Generator) -> Generator:
    """Scale the weights down in place, for comparisons of batches: large weights amplify rounding errors."""
    is_t5 = generator.model.config.model_type == "t5"  # T5 does not scale attention scores
    with torch.no_grad():
        for parameter in generator.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.1 if is_t5 else 0.4)
    return generator

"""Tiny models of other families with large weights, for the tokenizers of `tiny_pair()`."""

import torch
from tiny_generator import tiny_generator, tiny_pair
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from metaphrase.inference import Generator


def other_model(family: str) -> PreTrainedModel:
    """Return a model of `t5`, `bart`, `marian` or `fsmt`, with the same weights in every call."""
    fields = tiny_pair().config_fields()
    fields.pop("decoder_vocab_size")
    torch.manual_seed(0)
    if family == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "initializer_factor": 5.0}
        return T5ForConditionalGeneration(T5Config(**fields, **sizes)).eval()
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"init_std": 0.5, "forced_eos_token_id": None}
    if family == "fsmt":
        vocabulary = fields.pop("vocab_size")
        sizes |= {"langs": ["en", "de"], "src_vocab_size": vocabulary, "tgt_vocab_size": vocabulary}
        return FSMTForConditionalGeneration(FSMTConfig(**fields, **sizes)).eval()
    if family == "marian":
        return MarianMTModel(MarianConfig(**fields, **sizes)).eval()
    return BartForConditionalGeneration(BartConfig(**fields, **sizes)).eval()


def generator_of(family: str, **options) -> Generator:
    """Return a tiny generator of `metaphrase` (one vocabulary), `two vocabularies`, or another family."""
    if family == "metaphrase":
        return tiny_generator(**options)
    if family == "two vocabularies":
        return tiny_generator(joint=False, **options)
    return Generator(other_model(family), tiny_pair(), **options)


def calmer(generator: Generator) -> Generator:
    """Scale the weights down in place, for comparisons of batches: large weights amplify rounding errors."""
    is_t5 = isinstance(generator.model, T5ForConditionalGeneration)  # T5 does not scale attention scores
    with torch.no_grad():
        for parameter in generator.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.1 if is_t5 else 0.4)
    return generator

"""Models and sources for tests of the searches: Metaphrase ones and those of transformers, with large random weights."""

import functools

import torch
from converted_models import fill_randomly
from tiny_models import random_batch, tiny_model
from transformers import AutoModelForSeq2SeqLM, BartConfig, MarianConfig, PreTrainedModel, T5Config

ENDS = [4, 9, 12, 25, 31]
_BART = {"vocab_size": 37, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_BART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_T5 = {"vocab_size": 37, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 4}
# Options of `tiny_model`, or the configuration of another class.
MODELS = {
    "sinusoidal": {},
    "relative": {"position_embedding_type": "relative", "decoder_vocab_size": 31, "share_embeddings": False},
    "half precision": {},
    "bart": BartConfig(**_BART, forced_eos_token_id=None),
    "marian": MarianConfig(**_BART, forced_eos_token_id=None),
    "t5": T5Config(**_T5, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0),
}
OURS = ["sinusoidal", "relative"]


@functools.cache
def search_model(name: str) -> PreTrainedModel:
    """A model that is not to be changed, with no settings of its own."""
    made = MODELS[name]
    if isinstance(made, dict):
        return tiny_model(**made).to(torch.float16 if name == "half precision" else torch.float32)
    model = AutoModelForSeq2SeqLM.from_config(made).eval()
    fill_randomly(model, seed=1)
    return model


def search_sources(model: PreTrainedModel, batch: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sources of different lengths."""
    inputs = random_batch(tiny_model().config, batch=batch, source=11, seed=seed)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def one_of(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One source without its padding."""
    length = int(inputs["attention_mask"][row].sum())
    return {name: tensor[row : row + 1, :length] for name, tensor in inputs.items()}


def log_probabilities(model: PreTrainedModel, source: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of the next token of each target (targets, V), without a cache."""
    source = {name: tensor.expand(len(targets), -1) for name, tensor in source.items()}
    with torch.inference_mode():
        outputs = model(**source, decoder_input_ids=targets, use_cache=False)
    return outputs.logits[:, -1].float().log_softmax(-1)

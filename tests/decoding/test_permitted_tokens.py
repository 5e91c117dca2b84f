"""Decoding among permitted tokens: the tokens are those of a model whose other logits are minus infinity."""

import copy

import pytest
import torch
from tiny_models import DESIGNS, random_sources, tiny_model
from torch import nn
from transformers import GenerationMixin

from metaphrase.decoding import quantization
from metaphrase.decoding.fast_generation import generate

NEEDS_KERNELS = pytest.mark.skipif(not quantization.has_kernels(), reason="this build of torch lacks FBGEMM")
PERMITTED = torch.tensor([2, 4, 5, 8, 9, 13, 14, 17, 20, 22, 23, 27, 30])
SEARCHES = {
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.7},
    # Ids of processors are those of the whole vocabulary. 3 and 6 are permitted because they are forced.
    "processors": {"num_beams": 3, "forced_bos_token_id": 3, "forced_eos_token_id": 6, "no_repeat_ngram_size": 2}
    | {"bad_words_ids": [[8], [9, 13], [11]], "repetition_penalty": 1.3, "min_new_tokens": 2},
    "greedy processors": {"num_beams": 1, "suppress_tokens": [5, 12, 20], "repetition_penalty": 1.3},
}
OPTIONS = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": [5, 11]}


def find(model, inputs, options, permitted=None, return_scores=True):
    arguments = {"custom_generate": generate, "return_scores": return_scores, "permitted": permitted}
    output = model.generate(**inputs, **OPTIONS | options, **arguments)
    assert model.search_obstacle is None
    return output


@torch.inference_mode()
@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("design", ["learned", "relative"])
def test_tokens_are_those_of_masked_logits(design, name, monkeypatch):
    model, options = tiny_model(**DESIGNS[design]), SEARCHES[name]
    inputs = random_sources(model.config, batch=6)
    output = find(model, inputs, options, PERMITTED)
    forced = [options[key] for key in ("forced_bos_token_id", "forced_eos_token_id") if key in options]
    start = model.generation_config.decoder_start_token_id
    tokens = torch.tensor(sorted({*PERMITTED.tolist(), 5, 11, start, *forced}))
    reference, head = copy.deepcopy(model), model.lm_head
    reference.lm_head = nn.Linear(head.in_features, head.out_features)
    reference.lm_head.weight = head.weight
    is_forbidden = torch.ones(head.out_features, dtype=torch.bool)
    is_forbidden[tokens] = False
    bias = torch.zeros(head.out_features) if head.bias is None else head.bias.detach().clone()
    reference.lm_head.bias = nn.Parameter(bias.masked_fill(is_forbidden, -torch.inf))
    expected = find(reference, inputs, options)
    assert output.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-5)
    for loop in ("_sample", "_beam_search"):
        monkeypatch.setattr(type(model), loop, getattr(GenerationMixin, loop))
    assert output.sequences.tolist() == reference.generate(**inputs, **OPTIONS | options).tolist()
    # Without a list, the model writes other tokens.
    assert not set(find(model, inputs, options).sequences.flatten().tolist()) <= {*tokens.tolist(), 0}


@torch.inference_mode()
@pytest.mark.parametrize("int8", [pytest.param(True, marks=NEEDS_KERNELS), False])
@pytest.mark.parametrize("options", [{"do_sample": True, "num_return_sequences": 2, "top_k": 5}, {}])
def test_samples_and_targets_without_an_end_are_permitted(options, int8, monkeypatch):
    model = tiny_model(**DESIGNS["rotary"])
    if int8:
        monkeypatch.setattr(quantization, "_LEAST_SIZE", 1)
        quantization.quantize(model)
    ids = find(model, random_sources(model.config, batch=3), options | {"eos_token_id": -1}, PERMITTED).sequences
    start = model.generation_config.decoder_start_token_id
    assert ids.shape[1] == 10 and set(ids.flatten().tolist()) <= {*PERMITTED.tolist(), start}


@torch.inference_mode()
def test_other_loops_and_heads_select_from_all_tokens():
    model = tiny_model()
    inputs = random_sources(model.config, batch=3)
    expected = model.generate(**inputs, **OPTIONS)
    arguments = OPTIONS | {"custom_generate": generate, "return_scores": False, "permitted": PERMITTED}
    ids = model.generate(**inputs, **arguments, cache_implementation="static").sequences
    assert model.search_obstacle and ids.tolist() == expected.tolist()
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert model.generate(**inputs, **arguments).sequences.tolist() == expected.tolist()
    hook.remove()

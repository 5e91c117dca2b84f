"""Tests of `decoding.quantization`: products of rounded weights, each row alone, and shortlists with the best token."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from small_searches import search_model
from tiny_models import DESIGNS, random_sources, run_model, tiny_model
from torch import nn
from transformers import GenerationMixin

from metaphrase.decoding import quantization
from metaphrase.decoding.quantization import PackedLinear, ShortlistProjection, has_kernels
from metaphrase.engines.engine_choice import load_engine
from metaphrase.inference import quantize
from metaphrase.modeling import MetaphraseForConditionalGeneration

pytestmark = pytest.mark.skipif(not has_kernels(), reason="this build of torch has no kernels of FBGEMM")


@pytest.fixture
def all_sizes(monkeypatch):
    monkeypatch.setattr(quantization, "_LEAST_SIZE", 1)


def some_linear(bias=True):
    linear = nn.Linear(48, 33, bias=bias).requires_grad_(False)
    # Outputs of very different sizes, one of them nothing.
    linear.weight *= torch.logspace(-3, 3, 33)[:, None]
    linear.weight[5] = 0
    return linear


def some_states(*shape):
    states = torch.randn(*shape, 48) * torch.rand(*shape, 1).mul(8).exp()
    states[0] = 0
    return states


def rounded(states, levels):
    step = states.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / levels
    return (states / step).round() * step


@pytest.fixture(params=[63, 127])
def levels(request, monkeypatch):
    """Levels of activations that every processor can sum, and that this processor can sum."""
    levels = min(request.param, quantization.activation_levels())
    monkeypatch.setattr(quantization, "activation_levels", lambda: levels)
    return levels


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (2, 4), (0,)])
def test_int8_is_a_product_of_rounded_weights_and_states(shape, bias, levels):
    linear, states = some_linear(bias), some_states(*shape) if 0 not in shape else torch.zeros(*shape, 48)
    expected = nn.functional.linear(rounded(states, levels).double(), rounded(linear.weight, 127).double())
    expected = expected if linear.bias is None else expected + linear.bias
    output = PackedLinear(linear)(states)
    assert output.shape == expected.shape and output.dtype == torch.float32
    # Where a state lies half-way between two levels, division decides: few of so many.
    scale = states.norm(dim=-1, keepdim=True) * linear.weight.norm(dim=1)
    assert ((output - expected).abs() <= 2e-3 * scale + 1e-5).all()


@pytest.mark.parametrize("bias", [True, False])
def test_a_row_does_not_depend_on_its_batch(bias):
    linear, states = some_linear(bias), some_states(400)
    states[::2] = states[::2].relu()
    states[7, 3] = torch.nan
    layer = PackedLinear(linear)
    output, alone = layer(states), torch.cat([layer(row) for row in states.split(1)])
    assert output[7].isnan().all() and alone[7].isnan().all()
    # Another level of one entry would be 1e-3 of it.
    size = states.norm(dim=-1, keepdim=True) * linear.weight.norm(dim=1) + (1 if bias else 0)
    assert ((output - alone).abs() <= 1e-6 * size)[torch.arange(400) != 7].all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_the_largest_sums_are_exact(rows, sign, levels):
    linear = nn.Linear(512, 16, bias=False).requires_grad_(False)
    linear.weight.fill_(1.0)
    output = PackedLinear(linear)(torch.full((rows, 512), sign))
    torch.testing.assert_close(output, torch.full((rows, 16), sign * 512), atol=0, rtol=1e-5)


@pytest.mark.slow
def test_kernels_that_add_up_in_16_bits_get_7():
    """Run the test above in a process in which FBGEMM uses the kernels of a processor without VNNI."""
    environment = {**os.environ, "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from metaphrase.decoding.quantization import activation_levels; print(activation_levels())"
    command = [
        sys.executable,
        "-c",
        code + f"\nimport pytest; pytest.main(['-qk', 'largest_sums', '-Wignore', {__file__!r}])",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[0] == "63" and "12 passed" in done.stdout, done.stderr


def test_other_families(all_sizes):
    model = copy.deepcopy(search_model("t5"))
    ids = torch.randint(3, 37, (4, 9))
    with torch.inference_mode():
        expected = model(input_ids=ids, decoder_input_ids=ids).logits
        assert quantize(model) > 20
        logits = model(input_ids=ids, decoder_input_ids=ids).logits
    error = (logits - expected).norm() / expected.norm()
    assert 0 < error < 0.1
    assert model.generate(ids, max_new_tokens=4, num_beams=2).shape[0] == 4


def test_a_quantized_model_is_neither_trained_nor_saved(tmp_path, all_sizes):
    model = tiny_model()
    quantize(model)
    with pytest.raises(ValueError, match="must stay in evaluation mode"):
        model.train()
    with pytest.raises(ValueError, match="must not be saved"):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="`dtype` int8 needs the device cpu, got cuda:1"):
        load_engine("folder", None, None, engine="auto", device="cuda:1", dtype="int8")
    model.eval()
    copied = copy.deepcopy(model)
    assert torch.equal(run_model(copied).logits, run_model(model).logits)


def test_without_kernels_weights_stay_as_they_are(all_sizes, monkeypatch, caplog):
    monkeypatch.setattr(quantization, "has_kernels", lambda: False)
    model = tiny_model()
    expected = run_model(model).logits
    assert quantize(model) == 0
    assert torch.equal(run_model(model).logits, expected)
    assert "int8 weights need a torch with FBGEMM" in caplog.text


# Shortlists


VOCAB, HIDDEN = 5000, 64
# A large vocabulary, for a tiny model.
FIELDS = {"vocab_size": 600, "decoder_vocab_size": None, "share_embeddings": True}


def plain_head(bias=False):
    head = nn.Linear(HIDDEN, VOCAB, bias=bias).requires_grad_(False)
    # Tokens that are rare have short embeddings.
    head.weight.normal_().mul_(torch.rand(VOCAB, 1) + 0.1)
    return head


def states_towards(head, rows, strength):
    return torch.randn(rows, HIDDEN) + strength * head.weight[torch.randint(VOCAB, (rows,))]


@torch.no_grad()
@pytest.mark.parametrize(("strength", "bias", "rows"), [(0.5, False, 32), (0.5, True, 1), (2.0, True, 32)])
def test_the_most_probable_token_is_on_the_list(strength, bias, rows):
    head = plain_head(bias)
    states = states_towards(head, rows, strength)
    assert ShortlistProjection(head)(states, [], None).tolist() == head(states).argmax(dim=1).tolist()


@torch.no_grad()
@pytest.mark.parametrize(("value", "rows"), [(0.0, 2), (torch.nan, 2), (torch.inf, 2), (1.0, 33)])
def test_states_without_a_best_token_and_many_states_have_no_list(value, rows):
    head = plain_head()
    states = states_towards(head, rows, strength=2.0)
    states[1] *= value
    assert ShortlistProjection(head)(states, [], None) is None


@pytest.fixture
def lists(monkeypatch):
    """The tokens that shortlists of heads of any size give, or None."""
    made = []

    def recorded(*arguments, call=ShortlistProjection.__call__):
        made.append(call(*arguments))
        return made[-1]

    monkeypatch.setattr(quantization, "LEAST_SHORTLIST_SIZE", 0)
    monkeypatch.setattr(ShortlistProjection, "__call__", recorded)
    return made


def greedy(model, **options):
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1, "eos_token_id": 3} | options
    return model.generate(**random_sources(model.config), **settings).tolist()


def check_greedy_search(model, lists, **options):
    expected = greedy(model, **options, custom_generate=GenerationMixin._sample)
    lists.clear()
    assert greedy(model, **options) == expected
    assert lists


PROCESSORS = {
    "suppressed tokens": {"suppress_tokens": list(range(0, 600, 2))},
    "forced tokens": {"forced_bos_token_id": 41, "forced_eos_token_id": 3, "eos_token_id": None},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 8, "bad_words_ids": [[9]]},
}


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
def test_removed_tokens_are_removed_from_all(options, lists):
    check_greedy_search(tiny_model(**DESIGNS["learned"] | FIELDS), lists, **options)


def test_the_best_that_is_left_may_not_be_on_the_list(lists):
    """Every token that a list would select is suppressed, so that the best of what is left may be on no list."""
    model = tiny_model(**FIELDS)
    greedy(model)
    best = sorted({token for tokens in lists if tokens is not None for token in tokens.tolist()} - {3})
    check_greedy_search(model, lists, suppress_tokens=best)
    assert any(tokens is None for tokens in lists)


def test_capped_logits_and_options_that_raise_logits_or_need_all_make_no_list(lists):
    # A list has logits without the cap, to which a penalty does not do the same.
    greedy(tiny_model(**FIELDS, final_logit_softcapping=3.0), repetition_penalty=1.3)
    model = tiny_model(**FIELDS)
    for options in (
        *({"repetition_penalty": 0.7}, {"exponential_decay_length_penalty": (2, 1.5)}, {"num_beams": 3}),
        *({"sequence_bias": [[[9], 4.0]]}, {"renormalize_logits": True}, {"do_sample": True, "top_k": 5}),
    ):
        greedy(model, **options)
        assert not lists, options


def test_an_overridden_projection_is_called(lists):
    class Favouring(MetaphraseForConditionalGeneration):
        def project(self, hidden_states, head=None):
            return super().project(hidden_states, head) + 1e4 * nn.functional.one_hot(torch.tensor(9), 600)

    model = Favouring(tiny_model(**FIELDS).config).eval()
    assert all(set(row[1:]) == {9} for row in greedy(model)) and not lists

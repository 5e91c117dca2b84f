"""Tests of shortlists: the most probable token is on the list, and greedy search finds the same tokens."""

import pytest
import torch
from tiny_models import DESIGNS, random_sources, tiny_model
from torch import nn
from transformers import GenerationMixin

from metaphrase.decoding import quantization
from metaphrase.decoding.quantization import ShortlistProjection, has_kernels
from metaphrase.modeling import MetaphraseForConditionalGeneration

pytestmark = pytest.mark.skipif(not has_kernels(), reason="this build of torch has no kernels of FBGEMM")
VOCAB, HIDDEN = 5000, 64
# A large vocabulary, for a tiny model.
FIELDS = {"vocab_size": 600, "decoder_vocab_size": None, "share_embeddings": True}


def plain_head(bias=False):
    head = nn.Linear(HIDDEN, VOCAB, bias=bias).requires_grad_(False)
    # Tokens that are rare have short embeddings.
    head.weight.normal_().mul_(torch.rand(VOCAB, 1) + 0.1)
    return head


def states_towards(head, rows, strength):
    """States as of a decoder that is more or less sure of some token."""
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
    """Check that greedy search uses lists, and writes the tokens of transformers' loop."""
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

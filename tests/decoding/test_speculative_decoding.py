"""Tests of speculative decoding: tokens and distribution are those of the target model."""

import copy

import pytest
import torch
from decoder_states import fill_new_tensors_with_nan
from tiny_generator import SOURCES, tiny_generator, tiny_pair
from tiny_models import DESIGNS, tiny_model

from metaphrase.decoding.joint_search import BlockState
from metaphrase.inference import Generator, Partner, SpeculativeSearch, decode

ENDS = [5, 11, 17]
TEXTS = [[12, 2], [30, 4, 4, 4, 9, 2], [21, 6, 2], [3, 14, 15, 9, 2]]


def noisy(model, noise=0.1, seed=0):
    """A draft model that often agrees with the model, but not always."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std(correction=0), alpha=noise)
    return draft


def speculate(model, draft, texts=TEXTS, num_assistant_tokens=3, **options):
    search = SpeculativeSearch(num_assistant_tokens)
    rows = decode(model, texts, return_scores=True, partners=[Partner(draft, texts)], search=search, **options)
    return rows, search


def assert_same(found, expected):
    for row, alone in zip(found, expected, strict=True):
        assert [h.ids for h in row] == [h.ids for h in alone]
        assert [h.is_finished for h in row] == [h.is_finished for h in alone]
        assert [h.score for h in row] == pytest.approx([h.score for h in alone], abs=1e-3, rel=1e-4)


@pytest.mark.parametrize(("design", "num_assistant_tokens"), [*((design, 3) for design in DESIGNS), ("relative", 8)])
def test_greedy_tokens_are_those_of_the_model(design, num_assistant_tokens):
    model = tiny_model(**DESIGNS[design])
    options = {"max_new_tokens": 14, "eos_token_id": ENDS}
    draft, texts = noisy(model), [[token % model.config.vocab_size for token in text] for text in TEXTS]
    found, search = speculate(model, draft, texts, num_assistant_tokens, **options)
    assert_same(found, decode(model, texts, return_scores=True, **options))
    assert 0 < search.num_accepted < search.num_drafted


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 2.0, "min_new_tokens": 5},
        {"eos_token_id": list(range(2, 30))},
        {"max_new_tokens": 2},
        {"forced_bos_token_id": 8, "forced_eos_token_id": 5},
        {"exponential_decay_length_penalty": (3, 1.5)},
    ],
)
def test_options_mean_what_they_mean_without(options):
    model = tiny_model(decoder_layers=1)
    options = {"max_new_tokens": 14, "eos_token_id": ENDS} | options
    found, _ = speculate(model, noisy(model), **options)
    assert_same(found, decode(model, TEXTS, return_scores=True, **options))


def test_a_draft_of_another_architecture_that_reads_other_ids():
    model = tiny_model(**DESIGNS["alibi"] | {"num_key_value_heads": 2})
    draft = tiny_model(seed=1, vocab_size=50, decoder_vocab_size=37, share_embeddings=False, hidden_size=16, head_dim=4)
    options = {"max_new_tokens": 9, "eos_token_id": ENDS}
    partner = Partner(draft, [[49, *text, 40] for text in TEXTS])
    found = decode(model, TEXTS, return_scores=True, partners=[partner], search=SpeculativeSearch(), **options)
    assert_same(found, decode(model, TEXTS, return_scores=True, **options))


@pytest.mark.parametrize("positions", [14, 6, 2])
def test_a_draft_with_fewer_positions_stops_where_they_end(positions):
    model = tiny_model(position_embedding_type="learned", max_position_embeddings=14)
    draft = tiny_model(position_embedding_type="learned", max_position_embeddings=positions)
    texts, options = [text[-positions:] for text in TEXTS], {"max_length": 14, "eos_token_id": ENDS}
    found, search = speculate(model, draft, texts, **options)
    assert_same(found, decode(model, texts, return_scores=True, **options))
    assert search.num_drafted > 0


def test_a_draft_does_not_run_past_the_positions_of_the_model():
    """All targets of the model alone end before its positions do."""
    model = tiny_model(position_embedding_type="learned", max_position_embeddings=6)
    options = {"max_length": 40, "eos_token_id": list(range(24))}
    expected = decode(model, TEXTS, return_scores=True, **options)
    assert {len(h.ids) for [h] in expected} == {1, 2}
    found, _ = speculate(model, noisy(model), num_assistant_tokens=8, **options)
    assert_same(found, expected)


def test_unwritten_entries_may_be_nan(monkeypatch):
    model, options = tiny_model(), {"max_new_tokens": 25, "eos_token_id": None}
    expected = decode(model, TEXTS, return_scores=True, **options)
    fill_new_tensors_with_nan(monkeypatch)
    found, _ = speculate(model, noisy(model), **options)
    assert_same(found, expected)


def test_a_model_that_drafts_for_itself_is_always_right(monkeypatch):
    model, widths = tiny_model(), []
    step = BlockState.step
    monkeypatch.setattr(BlockState, "step", lambda self, ids: widths.append(len(ids)) or step(self, ids))
    _, search = speculate(model, model, TEXTS[:1], max_new_tokens=12, eos_token_id=None)
    assert search.num_accepted == search.num_drafted == 9
    # Three rounds: the draft model reads the prompt, later what it has not read of the last round; then the target model.
    assert widths == [1, 1, 1, 4, 2, 1, 1, 4, 2, 1, 1, 4]
    # Tokens that are drafted behind an end are not part of the target.
    [[ended]], search = speculate(model, model, TEXTS[:1], max_new_tokens=12, eos_token_id=list(range(2, 30)))
    assert search.num_accepted == len(ended.ids) < search.num_drafted


# Through the generator


@pytest.fixture(scope="module")
def generator():
    return tiny_generator()


@pytest.fixture(scope="module")
def draft(generator):
    return Generator(noisy(generator.model, 0.05), generator.tokenizers)


def test_texts_are_those_without_an_assistant(draft):
    generator = tiny_generator()
    texts = [*SOURCES, ""]
    expected = generator.generate(texts)
    for assistant, number in ((draft, None), (draft.model, 1)):
        assert generator.generate(texts, assistant_model=assistant, num_assistant_tokens=number) == expected
    scored = generator.generate_n_best(texts, assistant_model=draft)
    expected = generator.generate_n_best(texts)
    assert [c.text for [c] in scored] == [c.text for [c] in expected]
    assert [c.score for [c] in scored] == pytest.approx([c.score for [c] in expected], abs=1e-3)
    assert 0 < generator.num_accepted < generator.num_drafted


def test_a_draft_that_reads_by_its_own_tokenizer(generator):
    other_pair = type(generator.tokenizers)(tiny_pair(kind="byte").source, generator.tokenizers.target)
    small = tiny_model(seed=4, share_embeddings=False, **other_pair.config_fields())
    assistant = Generator(small, other_pair)
    assert generator.generate(SOURCES, assistant_model=assistant) == generator.generate(SOURCES)


def test_what_does_not_fit_is_refused(generator, draft):
    with pytest.raises(ValueError, match=r"The target vocabulary of `assistant_model` must be that of the first model"):
        generator.generate(SOURCES, assistant_model=tiny_generator(kind="byte"))
    with pytest.raises(ValueError, match="`num_beams` must be 1"):
        generator.generate(SOURCES, assistant_model=draft, num_beams=3)
    with pytest.raises(ValueError, match="`do_sample` false"):
        generator.generate(SOURCES, assistant_model=draft, do_sample=True)
    scaled = tiny_model(
        position_embedding_type="rotary", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(ValueError, match="Not supported here: rope_type"):
        speculate(scaled, scaled)

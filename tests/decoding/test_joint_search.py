"""Tests of ensembles, whose tokens are those of the mean over whole passes, and of drafts, which change no token."""

import copy
import functools

import pytest
import torch
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair
from tiny_models import DESIGNS, tiny_model
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from metaphrase.decoding.joint_search import BlockState
from metaphrase.inference import EnsembleSearch, Generator, Partner, SpeculativeSearch, decode
from metaphrase.inference.batches import pad_sources

ENDS = [5, 11, 17]
# The longer one of each two is shorter than the one before, so that decoding keeps their order.
ROWS = [[12, 2], [30, 4, 4, 4, 9, 2], [21, 6, 2], [7, 8, 9, 2], [9, 9, 2]]
# Ids that the second model reads, by a tokenizer of its own.
OTHER_TEXTS = [[12, 13, 14, 15, 16, 17, 2], [5, 4, 2], [33, 32, 31, 30, 2], [8, 2], [2]]
BEAMS = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6}


@pytest.fixture(scope="module")
def models():
    """Two models of different architectures, which agree in nothing but the target vocabulary."""
    one = tiny_model(**DESIGNS["sinusoidal"])
    # Its probabilities are as high as those of the first.
    fields = DESIGNS["alibi"] | {"initializer_range": 0.4}
    other = tiny_model(seed=1, **fields, vocab_size=41, decoder_vocab_size=37, hidden_size=24, share_embeddings=False)
    return one, other


def ensemble(models, texts=ROWS, other_texts=OTHER_TEXTS, **options):
    one, other = models
    options = {"max_new_tokens": 9, "eos_token_id": ENDS} | options
    partners, search = [Partner(other, other_texts)], EnsembleSearch()
    return decode(one, texts, return_scores=True, partners=partners, search=search, **options)


def plain(models, monkeypatch, **options):
    """Search with transformers' loop, with a pass of all models over the whole prefix at each step."""
    one, other = models
    inputs, other_inputs = pad_sources(ROWS, one), pad_sources(OTHER_TEXTS, other)
    memory = BaseModelOutput(last_hidden_state=other.get_encoder()(**other_inputs).last_hidden_state)
    forward = one.forward

    @functools.wraps(forward)  # transformers asks for the names of its arguments
    def mixed(decoder_input_ids, encoder_outputs, attention_mask, **kwargs):
        first = forward(
            decoder_input_ids=decoder_input_ids, encoder_outputs=encoder_outputs, attention_mask=attention_mask
        )
        copies = len(decoder_input_ids) // len(ROWS)
        repeated = BaseModelOutput(last_hidden_state=memory.last_hidden_state.repeat_interleave(copies, dim=0))
        mask = other_inputs["attention_mask"].repeat_interleave(copies, dim=0)
        second = other(decoder_input_ids=decoder_input_ids, encoder_outputs=repeated, attention_mask=mask)
        return Seq2SeqLMOutput(logits=((first.logits.softmax(-1) + second.logits.softmax(-1)) / 2).log())

    monkeypatch.setattr(one, "forward", mixed)
    loop = GenerationMixin._beam_search if options.get("num_beams", 1) > 1 else GenerationMixin._sample
    options |= {"return_dict_in_generate": True, "output_scores": True, "use_cache": False, "custom_generate": loop}
    with torch.inference_mode():
        output = one.generate(**inputs, **{"max_new_tokens": 9, "eos_token_id": ENDS} | options)
    monkeypatch.undo()
    return output


def cut(row):
    end = next((place for place, token in enumerate(row) if token in ENDS), len(row))
    return row[: end + 1]


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 1}, BEAMS], ids=["greedy", "processor", "beams"])
def test_tokens_are_those_of_whole_passes(models, options, monkeypatch):
    expected = plain(models, monkeypatch, **options)
    found = [hypothesis for row in ensemble(models, **options) for hypothesis in row]
    assert [h.ids for h in found] == [cut(row) for row in expected.sequences[:, 1:].tolist()]
    if "num_beams" in options:
        assert [h.score for h in found] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
    # Neither model writes these targets by itself.
    alone = [h.ids for row in decode(models[0], ROWS, max_new_tokens=9, eos_token_id=ENDS, **options) for h in row]
    assert alone != [h.ids for h in found]


PENALTIES = {"repetition_penalty": 2.5, "exponential_decay_length_penalty": (2, 1.5)}
ALONE = {
    "penalties": PENALTIES,
    "penalties of beams": BEAMS | PENALTIES,
    "penalties of samples": PENALTIES | {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_a_model_with_itself_is_that_model(models, options):
    one, _ = models
    options = {"max_new_tokens": 9, "eos_token_id": ENDS, "return_scores": True} | options
    torch.manual_seed(0)
    alone = decode(one, ROWS, **options)
    torch.manual_seed(0)
    search = EnsembleSearch()
    together = decode(one, ROWS, partners=[Partner(one, ROWS), Partner(one, ROWS)], search=search, **options)
    for row, expected in zip(together, alone, strict=True):
        assert [h.ids for h in row] == [h.ids for h in expected]
        assert [h.score for h in row] == pytest.approx([h.score for h in expected], abs=1e-4)


@pytest.mark.parametrize("options", [{}, BEAMS], ids=["greedy", "beams"])
def test_batched_is_alone(models, options):
    together = ensemble(models, **options)
    for found, text, other_text in zip(together, ROWS, OTHER_TEXTS, strict=True):
        [alone] = ensemble(models, texts=[text], other_texts=[other_text], **options)
        assert [h.ids for h in found] == [h.ids for h in alone]
        assert [h.score for h in found] == pytest.approx([h.score for h in alone], abs=1e-4)


# Through the generator


def test_from_several_folders(tmp_path):
    generators = [tiny_generator(joint=False, seed=seed) for seed in range(3)]
    folders = [save_generator(each, tmp_path / str(seed)) for seed, each in enumerate(generators)]
    loaded = Generator.from_pretrained(folders, device="cpu", source_prefix="a ")
    assert [member.source_prefix for member in loaded.members] == ["a ", "a "]
    first, *members = [tiny_generator(joint=False, seed=seed, source_prefix="a ") for seed in range(3)]
    together = Generator(first.model, first.tokenizers, source_prefix="a ", members=members)
    texts = loaded.generate([*SOURCES, ""], num_beams=2)
    assert texts == together.generate([*SOURCES, ""], num_beams=2) and texts[-1] == ""
    assert texts != first.generate([*SOURCES, ""], num_beams=2)
    assert Generator.from_pretrained(folders[:1], device="cpu").generate(SOURCES) == generators[0].generate(SOURCES)


MISFITS = {
    "tokenizers": (tiny_pair(kind="byte"), "The target vocabulary of {} must be .* tokens that differ"),
    "model": (torch.nn.Linear(2, 2), "{} and the first model must both be Metaphrase models, got Linear"),
    "model.config.decoder_vocab_size": (3, "`decoder_vocab_size` of {} must be that of the first model, .* got 3"),
    "model.config.eos_token_id": (3, "`eos_token_id` of {} must be that of the first model, .* got 3"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_members_that_do_not_fit_are_refused_by_name(name):
    first, other = tiny_generator(), tiny_generator(seed=1)
    value, message = MISFITS[name]
    *owners, attribute = name.split(".")
    setattr(functools.reduce(getattr, owners, other), attribute, value)
    with pytest.raises(ValueError, match=message.format("`model 2 of the ensemble`")):
        Generator(first.model, first.tokenizers, members=[other])


def test_what_only_one_model_can_do_is_refused(models):
    with pytest.raises(ValueError, match="sampled beams"):
        ensemble(models, num_beams=2, do_sample=True)
    with pytest.raises(ValueError, match="Not supported here: dtype"):
        ensemble((models[0], copy.deepcopy(models[1]).half()))


# Drafts


TEXTS = [[12, 2], [30, 4, 4, 4, 9, 2], [21, 6, 2], [3, 14, 15, 9, 2]]


def noisy(model, noise=0.1, seed=0):
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


@pytest.fixture
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

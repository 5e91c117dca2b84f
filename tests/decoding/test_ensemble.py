"""Tests of ensembles: tokens are those of the mean over whole passes of all models."""

import copy
import functools

import pytest
import torch
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair
from tiny_models import DESIGNS, tiny_model
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from metaphrase.inference import EnsembleSearch, Generator, Partner, decode
from metaphrase.inference.batches import pad_sources

ENDS = [5, 11, 17]
# The longer one of each two is shorter than the one before, so that decoding keeps their order.
TEXTS = [[12, 2], [30, 4, 4, 4, 9, 2], [21, 6, 2], [7, 8, 9, 2], [9, 9, 2]]
# What the second model reads, by a tokenizer of its own.
OTHER_TEXTS = [[12, 13, 14, 15, 16, 17, 2], [5, 4, 2], [33, 32, 31, 30, 2], [8, 2], [2]]
BEAMS = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6}


@pytest.fixture(scope="module")
def models():
    """Two models of different architectures, which agree in nothing but the target vocabulary."""
    one = tiny_model(**DESIGNS["sinusoidal"])
    # As sure of what it says as the first.
    fields = DESIGNS["alibi"] | {"initializer_range": 0.4}
    other = tiny_model(seed=1, **fields, vocab_size=41, decoder_vocab_size=37, hidden_size=24, share_embeddings=False)
    return one, other


def ensemble(models, texts=TEXTS, other_texts=OTHER_TEXTS, **options):
    one, other = models
    options = {"max_new_tokens": 9, "eos_token_id": ENDS} | options
    partners, search = [Partner(other, other_texts)], EnsembleSearch()
    return decode(one, texts, return_scores=True, partners=partners, search=search, **options)


def plain(models, monkeypatch, **options):
    """Search with transformers' loop, with a pass of all models over the whole prefix at each step."""
    one, other = models
    inputs, other_inputs = pad_sources(TEXTS, one), pad_sources(OTHER_TEXTS, other)
    memory = BaseModelOutput(last_hidden_state=other.get_encoder()(**other_inputs).last_hidden_state)
    forward = one.forward

    @functools.wraps(forward)  # transformers asks for the names of its arguments
    def mixed(decoder_input_ids, encoder_outputs, attention_mask, **kwargs):
        first = forward(
            decoder_input_ids=decoder_input_ids, encoder_outputs=encoder_outputs, attention_mask=attention_mask
        )
        copies = len(decoder_input_ids) // len(TEXTS)
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
    alone = [h.ids for row in decode(models[0], TEXTS, max_new_tokens=9, eos_token_id=ENDS, **options) for h in row]
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
    alone = decode(one, TEXTS, **options)
    torch.manual_seed(0)
    search = EnsembleSearch()
    together = decode(one, TEXTS, partners=[Partner(one, TEXTS), Partner(one, TEXTS)], search=search, **options)
    for row, expected in zip(together, alone, strict=True):
        assert [h.ids for h in row] == [h.ids for h in expected]
        assert [h.score for h in row] == pytest.approx([h.score for h in expected], abs=1e-4)


@pytest.mark.parametrize("options", [{}, BEAMS], ids=["greedy", "beams"])
def test_batched_is_alone(models, options):
    together = ensemble(models, **options)
    for found, text, other_text in zip(together, TEXTS, OTHER_TEXTS, strict=True):
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

"""Decoding: batches, order, ends of sequence, scores, and every type of weights."""

import math
import random

import pytest
import torch
from other_families import generator_of
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair
from transformers import GenerationConfig
from transformers.generation import utils

from metaphrase.inference import Generator
from metaphrase.inference.batches import decode, target_limits
from metaphrase.tokenization.texts import batches_by_length

BEAM = {"num_beams": 3, "num_return_sequences": 3}


@pytest.mark.parametrize(("batch_size", "max_tokens"), [(1, 100), (2, 100), (64, 12), (64, 1), (3, 20)])
def test_batches_hold_every_index_once_within_both_limits(batch_size, max_tokens):
    lengths = [3, 9, 1, 4, 4, 25, 2, 9]
    batches = batches_by_length(lengths, batch_size, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= batch_size
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens
    assert [lengths[index] for batch in batches for index in batch] == sorted(lengths, reverse=True)
    assert batches_by_length([5] * 6, 64, 15) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("options", [{}, BEAM], ids=["greedy", "beam"])
def test_batched_is_alone_in_the_order_of_the_sources(generator, sources, options):
    alone = [decode(generator.model, [source], return_scores=True, **options)[0] for source in sources]
    assert len({tuple(hypotheses[0].ids) for hypotheses in alone}) > 2
    for limits in ({}, {"batch_size": 2}, {"max_tokens_per_batch": 40}):
        together = decode(generator.model, sources, return_scores=True, **limits, **options)
        assert [[h.ids for h in hypotheses] for hypotheses in together] == [[h.ids for h in one] for one in alone]
        scores = [[h.score for h in hypotheses] for hypotheses in together]
        assert torch.allclose(torch.tensor(scores), torch.tensor([[h.score for h in one] for one in alone]), atol=1e-4)


LONGER = {"usual_source_length": 4, "max_length_limit": 21, "max_length": 6, "max_new_tokens": None}


@pytest.mark.parametrize("family", ["metaphrase", "bart"])
@pytest.mark.parametrize("options", [{}, BEAM, {"num_beams": 2, "early_stopping": "never"}], ids=str)
def test_a_longer_source_has_a_longer_limit_of_its_own(family, options):
    model = generator_of(family).model
    for name, value in (LONGER | {"eos_token_id": -1}).items():
        setattr(model.generation_config, name, value)
    sources = [[5 + index % 9 for index in range(length - 1)] + [2] for length in (9, 3, 4, 5, 8, 17, 40)]
    limits = [21, None, None, 12, 12, 21, 21]
    assert target_limits(model, {}, map(len, sources)) == [21, None, None, 12, 12, 21, 21]
    together = decode(model, sources, **options)
    assert [len(row[0].ids) for row in together] == [(limit or 6) - 1 for limit in limits]
    alone = [decode(model, [source], **options)[0] for source in sources]
    fixed = [
        decode(model, [source], max_length=limit or 6, **options)[0]
        for source, limit in zip(sources, limits, strict=True)
    ]
    texts = [[[hypothesis.ids for hypothesis in row] for row in rows] for rows in (together, alone, fixed)]
    assert texts[0] == texts[1] == texts[2]


def test_a_given_length_is_the_limit_of_all_sources(generator, sources):
    model, own = generator.model, vars(generator.model.generation_config)
    own |= LONGER | {"eos_token_id": -1}
    given = GenerationConfig(max_length=8, eos_token_id=-1, usual_source_length=2)
    for options in ({"max_length": 8}, {"max_new_tokens": 7}, {"generation_config": given}):
        assert {len(row[0].ids) for row in decode(model, sources, **options)} == {7}
    own["max_new_tokens"] = 7
    assert {len(row[0].ids) for row in decode(model, sources)} == {7}
    # Models of earlier versions do not declare the lengths of their sources.
    own |= {"max_new_tokens": None, "usual_source_length": None}
    assert {len(row[0].ids) for row in decode(model, sources)} == {5}


@pytest.mark.parametrize(
    ("options", "seed"), [({"encoder_repetition_penalty": 1.5}, 0), ({"encoder_no_repeat_ngram_size": 1}, 2)]
)
def test_what_looks_at_a_source_sees_no_padding(options, seed):
    generator, options = tiny_generator(seed=seed), {**options, "num_beams": 4}
    sources = generator.encode(SOURCES)
    alone = [decode(generator.model, [source], **options)[0][0].ids for source in sources]
    assert [best.ids for [best] in decode(generator.model, sources, **options)] == alone
    assert alone != [best.ids for [best] in decode(generator.model, sources, num_beams=4)]


@pytest.mark.parametrize("name", ["decoder_input_ids", "prefix_allowed_tokens_fn"])
def test_options_with_rows_of_a_batch_are_refused(generator, sources, name):
    with pytest.raises(ValueError, match=f"`{name}` has rows of a batch, which are no texts"):
        decode(generator.model, sources, **{name: torch.tensor([[0, 5]])})


@pytest.mark.parametrize(("form", "is_configured"), [(int, False), (list, True), (torch.tensor, False)])
def test_any_end_of_sequence_ends_a_target(generator, sources, form, is_configured):
    # A token in the middle of a target, but not of every target.
    written = [hypotheses[0].ids for hypotheses in decode(generator.model, sources)]
    middle = (token for ids in written for token in ids[1:-2])
    end = next(token for token in middle if not all(token in ids for ids in written))
    eos_token_id = end if form is int else form([generator.model.config.eos_token_id, end])
    options = {} if is_configured else {"eos_token_id": eos_token_id}
    generator.model.generation_config.update(**({"eos_token_id": eos_token_id} if is_configured else {}))
    full = [hypothesis.ids for [hypothesis] in decode(generator.model, sources, eos_token_id=-1)]
    results = [hypothesis for [hypothesis] in decode(generator.model, sources, **options)]
    assert {hypothesis.is_finished for hypothesis in results} == {True, False}
    for hypothesis, ids in zip(results, full, strict=True):
        assert hypothesis.is_finished == (hypothesis.ids[-1] == end)
        assert hypothesis.ids == (ids[: ids.index(end) + 1] if end in ids else ids)


def test_dropout_is_off_and_the_mode_is_left_as_it_was(generator, sources):
    model = generator.model
    expected = decode(model, sources[:1])
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.9
    for mode in (True, False):
        model.train(mode)
        assert decode(model, []) == []
        assert decode(model, sources[:1]) == expected
        generator.score(["a cat"], ["eine Katze"])
        with pytest.raises(ValueError, match="num_return_sequences"):
            decode(model, sources[:1], num_return_sequences=2)
        assert {module.training for module in model.modules()} == {mode}


def test_what_other_processes_decode_is_not_waited_for(generator, sources, monkeypatch):
    # Where DeepSpeed shares out weights, generate() would go on until all processes are done; a decoder's model is whole.
    expected, wanted = decode(generator.model, sources), []
    monkeypatch.setattr(utils, "is_deepspeed_zero3_enabled", lambda: True)
    for name, result in (("is_available", True), ("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(utils.dist, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(utils.dist, "all_reduce", lambda *_, **__: wanted.append(True))
    assert decode(generator.model, sources) == expected
    assert not wanted


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("family", ["metaphrase", "bart"])
@pytest.mark.parametrize("beams", [1, 3])
def test_an_end_that_is_forced_at_the_limit_is_none(family, beams):
    model, end = generator_of(family).model, 2
    sources = tiny_pair().encode_sources(SOURCES)
    own = decode(model, sources, num_beams=beams, max_new_tokens=8)
    model.generation_config.forced_eos_token_id = end
    for limits in ({"max_new_tokens": 8}, {"max_length": 9}, {}):
        model.generation_config.max_new_tokens = None if limits else 8
        found = [h for [h] in decode(model, sources, num_beams=beams, **limits)]
        assert any(len(h.ids) == 8 and not h.is_finished for h in found)
        assert all(h.ids[-1] == end and h.is_finished == (len(h.ids) < 8) for h in found)
    # With nothing to force, nothing has changed; and without any limit there are 20 tokens, as transformers has it.
    assert own == decode(model, sources, num_beams=beams, max_new_tokens=8, forced_eos_token_id=None)
    model.generation_config.max_new_tokens = None
    lengths = {h.is_finished: len(h.ids) for [h] in decode(model, sources, num_beams=beams)}
    assert lengths[False] == 20


def test_ids_that_the_embedding_has_no_row_for_are_refused(generator, sources):
    """A tokenizer may have more entries than its model."""
    size = generator.model.config.vocab_size
    with pytest.raises(ValueError, match=f"^Token ids must be rows of the model's embedding, below {size}, got {size}"):
        decode(generator.model, [*sources, [5, size, 2]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_generator(tiny_generator(layers=1), tmp_path_factory.mktemp("numerics") / "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_sources_in_batches_are_as_alone_in_every_type_of_weights(dtype, folder):
    rng, words = random.Random(3), " ".join(SOURCES).split()
    texts = ["", *(" ".join(rng.choices(words, k=rng.randrange(10))) for _ in range(38)), ""]
    batched, alone = (
        Generator.from_pretrained(folder, device="cpu", dtype=dtype, batch_size=size, max_tokens_per_batch=10**6)
        for size in (64, 1)
    )
    rows = [generator.generate_n_best(texts, num_beams=2, max_new_tokens=5) for generator in (batched, alone)]
    batched, alone = ([targets[0] for targets in row] for row in rows)
    assert all(math.isfinite(target.score) for target in batched + alone)
    num_equal = sum(first.text == second.text for first, second in zip(batched, alone, strict=True))
    # Half precision rounds sums by the shape of a product, and two beams may be close.
    assert num_equal == 40 if dtype in ("float32", "int8") else num_equal >= 38
    assert {rows[index].text for rows in (batched, alone) for index in (0, -1)} == {""}

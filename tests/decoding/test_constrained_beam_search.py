"""Tests of constrained beam search: targets contain the phrases, and are the best such targets."""

import itertools

import pytest
import torch
from small_searches import ENDS, OURS, log_probabilities, one_of, search_model, search_sources
from tiny_models import tiny_model

from metaphrase.inference import constrained_beam_search

OPTIONS = {"num_beams": 5, "max_new_tokens": 9, "eos_token_id": ENDS, "return_dict_in_generate": True}
CONSTRAINTS = {
    "one token": [[7]],
    "a phrase": [[7, 8, 7, 6]],
    "two": [[7, 8], [20, 3, 15]],
    "overlapping": [[7, 8, 10], [8, 10, 13], [13]],
    "one of several": [[[7, 8, 10, 13], [20, 21]], [[22], [23, 24]]],
    "repeating": [[7, 7, 8], [7, 7]],
    "all there is room for": [[7, 8, 10, 13], [20, 21, 22, 24, 26]],
}


def constrained(model, inputs, phrases, **options):
    search = {"custom_generate": constrained_beam_search, "force_words_ids": phrases}
    return model.generate(**inputs, **OPTIONS | options, **search)


def contains(ids, phrase):
    return any(ids[start : start + len(phrase)] == phrase for start in range(len(ids)))


def meets(ids, constraints):
    sets = [phrases if isinstance(phrases[0], list) else [phrases] for phrases in constraints]
    return all(any(contains(ids, phrase) for phrase in phrases) for phrases in sets)


def until_end(row, ends=ENDS):
    row = row[1:]
    end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: end + 1]


@pytest.mark.parametrize("phrases", CONSTRAINTS.values(), ids=CONSTRAINTS)
@pytest.mark.parametrize("name", OURS)
def test_every_target_contains_every_phrase_and_scores_what_it_is_worth(name, phrases):
    model = search_model(name)
    inputs = search_sources(model, batch=3)
    found = constrained(model, inputs, phrases, num_return_sequences=2, length_penalty=0.5)
    free = model.generate(**inputs, **OPTIONS).sequences.tolist()
    assert not all(meets(until_end(row), phrases) for row in free)
    for index, row in enumerate(found.sequences.tolist()):
        ids = until_end(row)
        assert meets(ids, phrases), (ids, phrases)
        with torch.inference_mode():
            logits = model(**one_of(inputs, index // 2), decoder_input_ids=torch.tensor([[row[0], *ids[:-1]]])).logits
        total = logits[0].log_softmax(-1).take_along_dim(torch.tensor(ids)[:, None], dim=1).sum().item()
        assert found.sequences_scores[index].item() == pytest.approx(total / len(ids) ** 0.5, abs=2e-3)


TINY = {"vocab_size": 6, "decoder_layers": 1, "initializer_range": 0.25}


@pytest.mark.parametrize(
    ("phrases", "length_penalty"),
    [([[4]], 0.0), ([[3, 4], [5]], 1.0), ([[[3, 3], [5]], [4]], 1.0), ([[4, 4], [3]], 0.0)],
)
def test_a_wide_beam_finds_the_best_of_all_targets(phrases, length_penalty):
    """Compare with all targets of at most 4 tokens of a vocabulary of 6."""
    end, most = 2, 4
    is_forced = False
    for seed in range(2):
        model = tiny_model(seed=seed, **TINY)
        source = {"input_ids": torch.tensor([[4, 3, 5, 2]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
        start = model.config.decoder_start_token_id
        # (6^3, length) -> log-probabilities of all tokens behind each beginning
        tree = {}
        for length in range(most):
            prefixes = list(itertools.product(range(6), repeat=length))
            targets = torch.tensor([[start, *prefix] for prefix in prefixes])
            tree.update(zip(prefixes, log_probabilities(model, source, targets).tolist(), strict=True))
        best = []
        for length in range(1, most + 1):
            for ids in itertools.product(range(6), repeat=length):
                whole = end not in ids[:-1] and (ids[-1] == end or length == most)
                if whole:
                    total = sum(tree[ids[:place]][token] for place, token in enumerate(ids))
                    best.append((total / length**length_penalty, list(ids)))
        best.sort(reverse=True)
        is_forced |= not meets(best[0][1], phrases)
        best = [(score, ids) for score, ids in best if meets(ids, phrases)]
        options = {"num_beams": 200, "max_new_tokens": most, "eos_token_id": end, "length_penalty": length_penalty}
        found = constrained(model, source, phrases, **options, num_return_sequences=3)
        for place, row in enumerate(found.sequences.tolist()):
            assert until_end(row, [end]) == best[place][1]
            assert found.sequences_scores[place].item() == pytest.approx(best[place][0], abs=1e-3)
    assert is_forced


def test_a_source_is_searched_as_if_it_were_alone():
    model = search_model("sinusoidal")
    inputs, options = search_sources(model, batch=8), {"num_beams": 3, "max_new_tokens": 20, "early_stopping": True}
    found = constrained(model, inputs, [[7, 8], [20]], **options)
    for index, row in enumerate(found.sequences.tolist()):
        alone = constrained(model, one_of(inputs, index), [[7, 8], [20]], **options)
        assert until_end(row) == until_end(alone.sequences[0].tolist())
        torch.testing.assert_close(found.sequences_scores[index], alone.sequences_scores[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("forced", [{"forced_bos_token_id": 8}, {"forced_eos_token_id": 4}, {"min_new_tokens": 9}])
def test_phrases_find_room_beside_what_other_settings_force(forced):
    model = search_model("sinusoidal")
    phrases = [[7, 8, 10, 13], [20, 21, 22, 24]]
    for row in constrained(model, search_sources(model), phrases, **forced).sequences.tolist():
        assert meets(until_end(row), phrases)
        assert row[1] == 8 or "forced_bos_token_id" not in forced
        assert row[9] == 4 or "forced_eos_token_id" not in forced


BEGINNINGS = {
    "nothing": ({}, [], True),
    "a forced token": ({"forced_bos_token_id": 6}, [], True),
    "the code of a language": ({"special_ids": [6]}, [6], True),
    "a code, behind which no token is forced": ({"special_ids": [6], "forced_bos_token_id": 8}, [6, 6], True),
    "text": ({}, [6], False),
}


@pytest.mark.parametrize(("options", "front", "may_begin"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_target_still_begins_behind_what_is_no_text(options, front, may_begin):
    model = search_model("sinusoidal")
    inputs = search_sources(model, batch=8)
    if front:
        prompt = torch.tensor([[model.generation_config.decoder_start_token_id, *front]] * 8)
        options = options | {"decoder_input_ids": prompt}
    settings = model.generation_config
    # Ids without text.
    special = {settings.bos_token_id, settings.decoder_start_token_id, settings.pad_token_id, *ENDS}
    special |= {6} if may_begin else set()
    firsts = set()
    for token in (20, 5, 2, 36):
        arguments = options | {"num_beams": 10, "first_words_ids": [[[token, 3]]]}
        for row in constrained(model, inputs, [[7, 8, 10]], **arguments).sequences.tolist():
            assert row[1] == 6 or not options
            text = list(itertools.dropwhile(lambda token: token in special, until_end(row)))
            begins = text[:2] == [token, 3]
            assert begins or contains(row, [7, 8, 10])
            firsts.add(begins)
    assert (True in firsts) == may_begin and (False in firsts or front or options)


@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.3, "early_stopping": True}, {"eos_token_id": None}])
@pytest.mark.parametrize("name", OURS)
def test_with_all_phrases_in_the_prompt_the_search_is_beam_search(name, options):
    model = search_model(name)
    inputs, start = search_sources(model), model.generation_config.decoder_start_token_id
    options = options | {"num_return_sequences": 5, "decoder_input_ids": torch.tensor([[start, 7, 8]] * 5)}
    found = constrained(model, inputs, [[7, 8]], **options)
    expected = model.generate(**inputs, **OPTIONS | options, output_scores=True)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OURS)
def test_a_phrase_that_the_prompt_begins_is_completed(name):
    model = search_model(name)
    inputs, start = search_sources(model, batch=2), model.generation_config.decoder_start_token_id
    prompts = torch.tensor([[start, 7, 8], [start, 9, 7]])
    options = {"max_new_tokens": 1, "decoder_input_ids": prompts}
    for row in constrained(model, inputs, [[7, 8]], **options).sequences.tolist():
        assert contains(row, [7, 8])
    with pytest.raises(ValueError, match="`max_new_tokens` or `num_beams`"):
        constrained(model, inputs, [[8, 10]], **options | {"decoder_input_ids": prompts[:, [0, 2, 1]]})


@pytest.mark.parametrize(
    ("name", "phrases", "options", "message"),
    [
        ("bart", [[7]], {}, "support a model of another family"),
        ("half precision", [[7]], {}, "support dtype"),
        ("sinusoidal", [[7, 37]], {}, "`force_words_ids` must hold ids"),
        ("sinusoidal", [[7, 4]], {}, "no end or padding"),
        ("sinusoidal", [[7] * 9], {"forced_eos_token_id": 4}, "`max_new_tokens` or `num_beams`"),
        ("sinusoidal", [[7]], {"num_beams": 1}, "`num_beams` must be at least 2"),
        (
            "sinusoidal",
            [[7], [8]],
            {"max_new_tokens": 2, "bad_words_ids": [[7, 8], [8, 7]]},
            r"got fewer for 5 of 5 sources",
        ),
    ],
)
def test_errors_name_the_argument(name, phrases, options, message):
    model = search_model(name)
    with pytest.raises(ValueError, match=message):
        constrained(model, search_sources(model), phrases, **options)

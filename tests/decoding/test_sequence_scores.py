"""Chosen scores: as transformers says them, with no vocabulary kept for each step."""

import pytest
import torch
from other_families import other_model
from tiny_generator import SOURCES, tiny_pair

from metaphrase.decoding.fast_generation import SequenceScores
from metaphrase.inference.batches import decode, pad_sources

OPTIONS = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "penalties": {"num_beams": 3, "length_penalty": 0.5, "repetition_penalty": 1.5},
    "samples": {"do_sample": True, "top_k": 9, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
}
LIMITS = {"max_new_tokens": 8, "eos_token_id": 22}


def kept_scores(model, sources, options):
    """What transformers says itself: of beams, or the sum of the transitions that were chosen."""
    output = model.generate(
        **pad_sources(sources, model),
        **options,
        **LIMITS,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    if options.get("num_beams", 1) > 1:
        return output.sequences_scores.tolist()
    # Samples are scored by the whole distribution.
    steps = output.logits if options.get("do_sample") else output.scores
    transitions = model.compute_transition_scores(output.sequences, steps, normalize_logits=True)
    totals = []
    for row, ids in zip(transitions.tolist(), output.sequences[:, -transitions.shape[1] :].tolist(), strict=True):
        totals.append(sum(row[: ids.index(22) + 1 if 22 in ids else None]))
    return totals


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scores_are_those_of_transformers_and_no_step_is_kept(options, monkeypatch):
    model, sources = other_model("t5"), sorted(tiny_pair().encode_sources(SOURCES), key=len, reverse=True)
    torch.manual_seed(3)
    expected = kept_scores(model, sources, options)
    steps, read = [], SequenceScores.__call__
    monkeypatch.setattr(SequenceScores, "__call__", lambda *args, **_: (read(*args), steps.append(args[2][-1]))[0])
    torch.manual_seed(3)
    found = decode(model, sources, return_scores=True, **options, **LIMITS)
    assert [h.score for row in found for h in row] == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) > 2
    assert len(steps) > 2 and all(step.numel() == 0 for step in steps)
    torch.manual_seed(3)
    unscored = decode(model, sources, **options, **LIMITS)
    assert [[h.ids for h in row] for row in unscored] == [[h.ids for h in row] for row in found]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scores_are_the_same_without_the_fast_loop(options, monkeypatch):
    model, sources = other_model("t5"), tiny_pair().encode_sources(SOURCES)
    rows = []
    for is_fast in (True, False):
        if not is_fast:
            monkeypatch.setattr("metaphrase.inference.batches.plugin", lambda place: None)
        torch.manual_seed(3)
        rows.append([h for row in decode(model, sources, return_scores=True, **options, **LIMITS) for h in row])
    assert [h.ids for h in rows[0]] == [h.ids for h in rows[1]]
    assert [h.score for h in rows[0]] == pytest.approx([h.score for h in rows[1]], abs=1e-5)


def test_drafted_tokens_are_scored_too():
    model, sources = other_model("bart"), tiny_pair().encode_sources(SOURCES)
    plain = decode(model, sources, return_scores=True, **LIMITS)
    drafted = decode(model, sources, return_scores=True, prompt_lookup_num_tokens=3, **LIMITS)
    for [expected], [found] in zip(plain, drafted, strict=True):
        assert found.ids == expected.ids and found.score == pytest.approx(expected.score, abs=1e-4)

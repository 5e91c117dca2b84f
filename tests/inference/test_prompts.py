"""Prompts: the first tokens of each target stay with their text, whatever is decoded beside it."""

import pytest
import torch
from tiny_generator import SOURCES

from metaphrase.inference.batches import decode

TEXTS = [SOURCES[2], "", SOURCES[3], " ", *SOURCES]


@pytest.fixture
def prompts(generator):
    """For each text the start token and a token of its own."""
    start = generator.model.config.decoder_start_token_id
    return [[start, 5 + index] for index in range(len(TEXTS))]


@pytest.mark.parametrize("form", [list, torch.tensor])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beam"])
def test_prompts_stay_with_their_texts(options, form, generator, prompts):
    found = generator.generate_n_best(TEXTS, decoder_input_ids=form(prompts), **options)
    generator.batch_size = 2
    assert [[c.text for c in row] for row in found] == [
        [c.text for c in row] for row in generator.generate_n_best(TEXTS, decoder_input_ids=form(prompts), **options)
    ]
    for text, prompt, candidates in zip(TEXTS, prompts, found, strict=True):
        [alone] = generator.generate_n_best([text], decoder_input_ids=[prompt], **options)
        assert [c.text for c in candidates] == [c.text for c in alone]
        assert [c.score for c in candidates] == pytest.approx([c.score for c in alone], abs=1e-4)
        beginning = generator.tokenizers.decode_targets([prompt[1:]])[0]
        assert not text.strip() or all(c.text.startswith(beginning) for c in candidates)
    # The start token may be left out, by all.
    bare = generator.generate_n_best(TEXTS, decoder_input_ids=[prompt[1:] for prompt in prompts], **options)
    assert [[c.text for c in row] for row in bare] == [[c.text for c in row] for row in found]


def test_one_row_is_for_all_texts_of_a_stream_too(generator, prompts):
    [prompt] = prompts[6:7]
    found = generator.generate(TEXTS, decoder_input_ids=[prompt])
    assert found == generator.generate(TEXTS, decoder_input_ids=[prompt] * len(TEXTS)) != generator.generate(TEXTS)
    stream = generator.generate_stream(TEXTS, chunk_size=2, decoder_input_ids=[prompt])
    assert [row[0].text for row in stream] == found


def test_scores_are_of_what_was_written_behind_the_prompt(generator):
    """Targets of different lengths, and a prompt that holds an end of sequence."""
    model, sources = generator.model, generator.tokenizers.encode_sources(SOURCES)
    start, end = model.config.decoder_start_token_id, model.config.eos_token_id
    prompt = [start, end, 7]
    free = [hypothesis.ids for [hypothesis] in decode(model, sources, decoder_input_ids=[prompt], eos_token_id=-1)]
    ends = [end, next(token for token in free[0][3:6] if not all(token in row[2:4] for row in free))]
    found = decode(model, sources, decoder_input_ids=[prompt], eos_token_id=ends, return_scores=True)
    assert len({len(hypothesis.ids) for [hypothesis] in found}) > 1
    for source, [hypothesis] in zip(sources, found, strict=True):
        assert hypothesis.ids[:2] == prompt[1:] and hypothesis.is_finished == (hypothesis.ids[-1] in ends)
        assert len(hypothesis.ids) > 2
        labels = torch.tensor([hypothesis.ids])
        with torch.inference_mode():
            log_probs = model(input_ids=torch.tensor([source]), labels=labels).logits.log_softmax(-1)
        behind = log_probs.gather(-1, labels[..., None])[0, 2:].sum().item()
        assert hypothesis.score == pytest.approx(behind, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_input_ids": [[1, 5]] * 2}, "`decoder_input_ids` must have 1 row or one for each text, got 2 for 5"),
        ({"decoder_input_ids": [1, 5]}, r"`decoder_input_ids` must be rows of ids of one length, got \[1, 5\]"),
        ({"decoder_input_ids": [[1, 5], [1]]}, "`decoder_input_ids` must be rows of ids of one length"),
        ({"prefix_allowed_tokens_fn": print}, "`prefix_allowed_tokens_fn` sees rows of a batch"),
        (
            {"decoder_input_ids": [[1, 5], *[[5, 6]] * 4]},
            "must begin with the start token, 1, in all rows or in none, .* 1 of 5",
        ),
    ],
)
def test_what_fits_no_texts_is_refused(options, message, generator, prompts):
    with pytest.raises(ValueError, match=message):
        generator.generate(SOURCES, **options)
    with pytest.raises(ValueError, match="`decoder_input_ids` must have one row for all texts in a stream, got 9"):
        list(generator.generate_stream(TEXTS, decoder_input_ids=prompts))

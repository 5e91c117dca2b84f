"""Tests of `generate()` of Metaphrase models: each option has its effect, with every cache."""

import itertools

import pytest
import torch
from tiny_models import DESIGNS, random_sources, tiny_model
from transformers import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

CLOSE = {"atol": 1e-3, "rtol": 1e-3}
START, END = 1, 2
SAMPLE = {"do_sample": True}
BEAM = {"num_beams": 3}


def seeded_generate(model, inputs, **options):
    torch.manual_seed(3)
    return model.generate(**inputs, **({"max_new_tokens": 6} | options))


def all_differ(items):
    items = [tuple(item) if isinstance(item, list) else item for item in items]
    return len(set(items)) == len(items)


def has_no_repeated_pair(row):
    return all_differ(itertools.pairwise(token for token in row if token not in (0, END)))


def is_even(row):
    return all(token % 2 == 0 for token in row[1:] if token < 31)


ODD_TOKENS = list(range(1, 31, 2))


# Options, and a condition that the output rows must meet, as lists.
WAYS = {
    "greedy": ({}, lambda rows: len(rows) == 3),
    "temperature": (SAMPLE | {"temperature": 2.0}, None),
    "top_k": (SAMPLE | {"top_k": 5}, None),
    "top_p": (SAMPLE | {"top_p": 0.8, "top_k": 0}, None),
    "min_p": (SAMPLE | {"min_p": 0.05}, None),
    "typical": (SAMPLE | {"typical_p": 0.8}, None),
    "epsilon": (SAMPLE | {"epsilon_cutoff": 0.01}, None),
    "eta": (SAMPLE | {"eta_cutoff": 0.01}, None),
    "sampled often": (SAMPLE | {"num_return_sequences": 4}, lambda rows: len(rows) == 12),
    "beam": (BEAM, lambda rows: len(rows) == 3),
    "beam, all returned": (
        BEAM | {"num_return_sequences": 3},
        lambda rows: all(all_differ(rows[start : start + 3]) for start in (0, 3, 6)),
    ),
    "beam, sampled": (BEAM | SAMPLE, lambda rows: len(rows) == 3),
    "beam, stopped early": (BEAM | {"early_stopping": True}, None),
    "beam, never stopped": (BEAM | {"early_stopping": "never", "length_penalty": 2.0}, None),
    "repetition penalty": ({"repetition_penalty": 1e6, "max_new_tokens": 5}, lambda rows: all(map(all_differ, rows))),
    "no repeated pair": (BEAM | {"no_repeat_ngram_size": 2}, lambda rows: all(map(has_no_repeated_pair, rows))),
    "bad words": (BEAM | {"bad_words_ids": [[token] for token in ODD_TOKENS]}, lambda rows: all(map(is_even, rows))),
    "first token": ({"forced_bos_token_id": 9}, lambda rows: all(row[1] == 9 for row in rows)),
    "last token": (BEAM | {"forced_eos_token_id": END}, lambda rows: all(END in row for row in rows)),
    "allowed tokens": (
        BEAM | {"prefix_allowed_tokens_fn": lambda row, ids: list(range(2, 31, 2))},
        lambda rows: all(map(is_even, rows)),
    ),
    "sequence bias": ({"sequence_bias": {(7,): 1e4}}, lambda rows: all(set(row[1:]) == {7} for row in rows)),
    "at least": ({"min_new_tokens": 6}, lambda rows: all(END not in row[:-1] for row in rows)),
    "suppressed": ({"suppress_tokens": ODD_TOKENS}, lambda rows: all(map(is_even, rows))),
    "suppressed at first": ({"begin_suppress_tokens": list(range(30))}, lambda rows: all(row[1] == 30 for row in rows)),
    "longer": (BEAM | {"exponential_decay_length_penalty": (1, 4.0)}, lambda rows: all(END in row for row in rows)),
    "renormalized": (BEAM | {"renormalize_logits": True, "remove_invalid_values": True}, None),
}


@pytest.mark.parametrize("way", WAYS)
def test_options_with_every_cache(way):
    options, promise = WAYS[way]
    model = tiny_model(**DESIGNS["rotary"])
    inputs = random_sources(model.config, padding="left")
    text = seeded_generate(model, inputs, **options)
    assert text.shape[1] <= 7 and (text[:, 0] == START).all()
    # A criterion of the caller runs in transformers' loops.
    never = StoppingCriteriaList([MaxTimeCriteria(max_time=1e4)])
    for cache in ({"use_cache": False}, {"cache_implementation": "static"}):
        assert torch.equal(seeded_generate(model, inputs, **options, **cache, stopping_criteria=never), text)
        assert model.last_search.loop == "transformers"
    assert promise is None or promise(text.tolist())


# Outputs beside the ids


def log_probability(model, inputs, text):
    """Log-probability of each row and its length, by teacher forcing, up to and with the end token."""
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=text[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, text[:, 1:, None])[..., 0]
    is_over = (text[:, 1:] == END).cumsum(-1) - (text[:, 1:] == END).long() > 0
    return chosen.masked_fill(is_over, 0).sum(-1), (~is_over).sum(-1)


def repeated(inputs, times):
    return {name: tensor.repeat_interleave(times, dim=0) for name, tensor in inputs.items()}


@pytest.mark.parametrize("design", DESIGNS)
def test_score_of_a_beam_is_its_log_probability(design, length_penalty=0.6):
    model = tiny_model(**DESIGNS[design])
    inputs = random_sources(model.config, padding="left")
    outputs = model.generate(
        **inputs,
        num_beams=4,
        num_return_sequences=4,
        length_penalty=length_penalty,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_scores=True,
    )
    total, length = log_probability(model, repeated(inputs, 4), outputs.sequences)
    torch.testing.assert_close(outputs.sequences_scores, total / length**length_penalty, **CLOSE)
    assert (outputs.sequences_scores.view(3, 4).diff(dim=-1) <= 0).all()


# Inputs


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("design", ["learned", "rotary"])
def test_encoded_and_embedded_sources(design, beams):
    model = tiny_model(**DESIGNS[design])
    inputs = random_sources(model.config, padding="left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    options = {"max_new_tokens": 6, "num_beams": beams, "attention_mask": mask}
    expected = model.generate(ids, **options)
    with torch.no_grad():
        encoder_output = model.get_encoder()(ids, attention_mask=mask)
        embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(encoder_outputs=encoder_output, **options), expected)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **options), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("design", DESIGNS)
def test_half_precision_generates_alike_with_every_cache(design, dtype):
    model = tiny_model(**DESIGNS[design]).to(dtype)
    inputs = random_sources(model.config, padding="left")
    dynamic = seeded_generate(model, inputs, num_beams=2)
    assert torch.equal(seeded_generate(model, inputs, num_beams=2, cache_implementation="static"), dynamic)


# Streamers, draft models


class Recorder(BaseStreamer):
    """A streamer that stores its tokens."""

    def __init__(self):
        self.tokens, self.is_over = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.is_over = True


def test_streamer_sees_every_token():
    model = tiny_model()
    inputs = random_sources(model.config, batch=1)
    recorder = Recorder()
    text = model.generate(**inputs, streamer=recorder, max_new_tokens=6)
    assert recorder.tokens == text[0].tolist() and recorder.is_over


@pytest.mark.parametrize("design", DESIGNS)
def test_assisted_generation_is_greedy_generation(design):
    """The assistant's guesses are checked several at a time, and the cache loses those that were wrong."""
    model = tiny_model(**DESIGNS[design])
    inputs = random_sources(model.config, batch=1)
    inputs["input_ids"][0, 2:] = 7
    options = {"max_new_tokens": 9, "min_new_tokens": 9}
    expected = model.generate(**inputs, **options)
    for seed in (0, 1):
        assistant = tiny_model(**DESIGNS[design], seed=seed)
        assistant.generation_config.num_assistant_tokens = 4
        assistant.generation_config.assistant_confidence_threshold = 0
        assert torch.equal(model.generate(**inputs, **options, assistant_model=assistant), expected)
    widths = []
    model.lm_head.register_forward_hook(lambda module, args, output: widths.append(args[0].shape[1]))
    assert torch.equal(model.generate(**inputs, **options, prompt_lookup_num_tokens=3), expected)
    assert max(widths) > 1

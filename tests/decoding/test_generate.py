"""Tests of `generate()` of Metaphrase models: transformers' own loops define tokens and scores, in every way to compute them."""

import itertools

import pytest
import torch
from tiny_models import DESIGNS, random_sources, tiny_model
from transformers import GenerationMixin
from transformers.generation import BaseStreamer

from metaphrase.decoding import prepacked_weights, quantization
from metaphrase.decoding.beam_search import top_of_rows
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.fast_generation import generate as fast_generate

ENDS = [5, 11, 17, 23]
BEAMS = {"num_beams": 3}
SAMPLES = {"do_sample": True, "eos_token_id": None}


def sources(model, batch=6, **options):
    return random_sources(model.config, batch=batch, source=13, padding="left", **options)


def generate(model, inputs, **options):
    torch.manual_seed(3)
    return model.generate(**inputs, **{"max_new_tokens": 12, "do_sample": False, "eos_token_id": ENDS} | options)


def check(model, inputs, **options):
    """Check that the fast loop runs and writes the tokens of transformers' loop, and return them."""
    loop = GenerationMixin._beam_search if options.get("num_beams", 1) > 1 else GenerationMixin._sample
    expected = generate(model, inputs, **options, custom_generate=loop)
    found = generate(model, inputs, **options)
    assert found.tolist() == expected.tolist(), options
    assert model.search_obstacle is None
    return found


@pytest.fixture
def step_rows(monkeypatch):
    rows, step = [], DecoderState.step
    monkeypatch.setattr(DecoderState, "step", lambda state, tokens: rows.append(len(tokens)) or step(state, tokens))
    return rows


# Designs, options, caches


@pytest.mark.parametrize("design", DESIGNS)
def test_every_design_searches_as_transformers_does(design):
    model = tiny_model(**DESIGNS[design])
    inputs = sources(model)
    check(model, inputs)
    for early_stopping, beams, penalty in ((True, 8, -0.5), (False, 2, 1.4), ("never", 8, 1.4)):
        check(model, inputs, num_beams=beams, length_penalty=penalty, early_stopping=early_stopping)


PROMPTS = torch.tensor([[2, 9, 4], [2, 8, 30], [2, 12, 12]] * 2)
OPTIONS = [
    *({"no_repeat_ngram_size": 1}, {"eos_token_id": 7, "pad_token_id": 30}, {"eos_token_id": None, "pad_token_id": 9}),
    *({"max_new_tokens": 1}, {"min_new_tokens": 6}, {"forced_bos_token_id": 8, "forced_eos_token_id": 5}),
    {"repetition_penalty": 3.0, "suppress_tokens": [4, 6], "begin_suppress_tokens": [9, 10]},
    {"bad_words_ids": [[4], [6, 7]], "exponential_decay_length_penalty": (3, 1.5), "renormalize_logits": True},
    *({"sequence_bias": {(7,): 2.0}, "remove_invalid_values": True}, {"decoder_input_ids": PROMPTS}),
]
BEAM_OPTIONS = [
    *({"num_return_sequences": 3}, {"num_return_sequences": 4, "no_repeat_ngram_size": 1}),
    *(
        {"eos_token_id": list(range(1, 34)), "num_return_sequences": 4},
        {"max_new_tokens": 1, "num_return_sequences": 4},
    ),
    {"num_beams": 36, "num_return_sequences": 36, "max_new_tokens": 3},
    # No hypothesis ends, and the prompt is returned.
    {"suppress_tokens": [t for t in range(37) if t != 3], "max_new_tokens": 1, "num_return_sequences": 4},
]
# Draws are those of transformers until a target ends.
DRAWS = [{}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.5}, {"min_p": 0.1}, {"typical_p": 0.6}]
DRAWS += [{"epsilon_cutoff": 0.01}, {"eta_cutoff": 0.01}, {"num_return_sequences": 3, "top_k": 9}]
TABLE = [*OPTIONS, *({"num_beams": 4} | options for options in OPTIONS + BEAM_OPTIONS)]
TABLE += [SAMPLES | options for options in DRAWS]


@pytest.mark.parametrize("options", TABLE, ids=lambda options: ", ".join(options))
def test_options_have_the_effect_of_transformers(options):
    model = tiny_model(decoder_layers=1)
    check(model, sources(model), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("design", ["learned", "relative", "rotary"])
def test_half_precision_generates_alike_with_every_cache(design, dtype):
    model = tiny_model(**DESIGNS[design]).to(dtype)
    inputs, options = random_sources(model.config, padding="left"), {"num_beams": 2, "max_new_tokens": 6}
    dynamic = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, cache_implementation="static"), dynamic)


# Other ways to compute the same


@pytest.fixture
def prepare(monkeypatch):
    """Return a function that makes a tiny model compute as only large models do by default."""

    def change(variant, model):
        if variant == "prepacked":
            monkeypatch.setattr(prepacked_weights, "can_prepack", lambda *shape: True)
        elif variant == "unpadded":
            monkeypatch.setattr(prepacked_weights, "LEAST_HIDDEN_SIZE", 0)
        elif variant == "shortlist":
            monkeypatch.setattr(quantization, "LEAST_SHORTLIST_SIZE", 0)
        elif variant == "int8":
            monkeypatch.setattr(quantization, "_LEAST_SIZE", 1)
            assert quantization.quantize(model) > 20

    return change


@pytest.mark.parametrize("options", [{}, BEAMS, SAMPLES], ids=["greedy", "beams", "samples"])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("variant", ["prepacked", "unpadded", "shortlist", "int8"])
def test_kernels_write_the_same(variant, design, options, prepare):
    if variant in ("shortlist", "int8") and not quantization.has_kernels():
        pytest.skip("this build of torch has no kernels of FBGEMM")
    fields = {"vocab_size": 600, "decoder_vocab_size": None} if variant == "shortlist" else {}
    model = tiny_model(**DESIGNS[design] | fields)
    inputs = sources(model)
    before = generate(model, inputs, **options)
    for module in (model.get_decoder(), model.get_encoder()):
        prepacked_weights._copies.pop(module, None)
    prepare(variant, model)
    after = check(model, inputs, **options | {"max_new_tokens": 6} if variant == "int8" else options)
    assert variant == "int8" or after.tolist() == before.tolist()


@pytest.mark.parametrize("options", [{}, BEAMS | {"early_stopping": True}], ids=["greedy", "beams"])
def test_batched_is_alone_and_ended_sources_are_not_computed(options, step_rows):
    model = tiny_model(decoder_layers=1)
    inputs, copies = sources(model, batch=12), options.get("num_beams", 1)
    options = options | {"max_new_tokens": 20}
    together, rows = generate(model, inputs, **options), list(step_rows)
    # The first step is the same for all hypotheses of a source.
    assert rows[0] == 12 and rows[1:] == sorted(rows[1:], reverse=True) and len(set(rows[1:])) > 2
    assert all(count % copies == 0 for count in rows[1:])
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        source = {name: tensor[row : row + 1, mask] for name, tensor in inputs.items()}
        [alone] = generate(model, source, **options)
        assert together[row, : len(alone)].tolist() == alone.tolist()


def test_samples_that_have_ended_leave_the_batch(step_rows):
    model = tiny_model(decoder_layers=1)
    outputs = generate(model, sources(model, batch=12), do_sample=True, num_return_sequences=2, max_new_tokens=25)
    rows = step_rows
    assert rows[:2] == [12, 24] and rows[1:] == sorted(rows[1:], reverse=True) and len(set(rows[1:])) > 2
    # After its end a row is padding, and no row is cut off before it.
    for row in outputs[:, 1:].tolist():
        end = next((place for place, token in enumerate(row) if token in ENDS), len(row))
        assert set(row[end + 1 :]) <= {model.config.pad_token_id}


def test_draws_follow_the_distribution_of_the_model_where_rows_leave():
    """Draw many second tokens: the share of each token is its probability, within five standard deviations."""
    model = tiny_model(decoder_layers=1, vocab_size=12, initializer_range=0.15)
    inputs, copies, ends = sources(model, batch=2), 4000, [3, 4]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "num_return_sequences": copies, "eos_token_id": ends}
    drawn, checked = generate(model, inputs, **options).view(2, copies, 3), 0
    for row, first in itertools.product(range(2), range(12)):
        seconds = drawn[row][drawn[row, :, 1] == first][:, 2]
        if first in ends:
            assert set(seconds.tolist()) <= {model.config.pad_token_id}
        elif (count := len(seconds)) >= 200:
            source = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
            prompt = torch.tensor([[model.config.decoder_start_token_id, first]])
            with torch.inference_mode():
                expected = model(**source, decoder_input_ids=prompt).logits[0, -1].softmax(-1)
            deviation = (expected * (1 - expected) / count).sqrt()
            shares = torch.bincount(seconds, minlength=12) / count
            assert ((shares - expected).abs() < 5 * deviation + 1e-3).all()
            checked += 1
    assert checked > 5


# Scores


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        BEAMS | {"num_return_sequences": 3, "length_penalty": 0.6},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0, "top_p": 0.5},
    ],
    ids=["greedy", "beams", "samples"],
)
def test_scores_are_log_probabilities_of_the_model(options, design):
    model = tiny_model(**DESIGNS[design])
    inputs, copies = sources(model), options.get("num_return_sequences", 1)
    output = generate(model, inputs, **options, custom_generate=fast_generate, return_scores=True)
    repeated = {name: tensor.repeat_interleave(copies, dim=0) for name, tensor in inputs.items()}
    with torch.inference_mode():
        logits = model(**repeated, decoder_input_ids=output.sequences[:, :-1]).logits
    targets = output.sequences[:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None].clamp(min=0))[..., 0]
    is_end = torch.isin(targets, torch.tensor(ENDS)).long()
    is_padding = is_end.cumsum(-1) - is_end > 0
    expected = log_probs.masked_fill(is_padding, 0).sum(-1) / (~is_padding).sum(-1) ** options.get("length_penalty", 0)
    torch.testing.assert_close(output.sequences_scores, expected, atol=1e-3, rtol=1e-3)
    if "num_beams" in options:
        assert (output.sequences_scores.view(-1, copies).diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("columns", [100, 16384, 40003])
def test_the_largest_entries_of_long_rows_are_those_of_topk(columns):
    rows = torch.randn(3, columns)
    # Forbidden tokens, and the rows of beams that do not continue.
    rows[1, 40:] = -torch.inf
    rows[2, columns // 2 :] -= 1e9
    values, indices = top_of_rows(rows, 8)
    expected = rows.topk(8)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)


# Inputs, streamers, draft models


@pytest.mark.parametrize("options", [{}, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("design", ["learned", "rotary"])
def test_encoded_and_embedded_sources(design, options):
    model = tiny_model(**DESIGNS[design])
    ids, mask = sources(model).values()
    expected = generate(model, {"input_ids": ids, "attention_mask": mask}, **options)
    with torch.no_grad():
        encoder_output = model.get_encoder()(ids, attention_mask=mask)
        embeddings = model.get_input_embeddings()(ids)
    for inputs in ({"encoder_outputs": encoder_output}, {"inputs_embeds": embeddings}):
        assert torch.equal(generate(model, inputs | {"attention_mask": mask}, **options), expected)


def test_streamer_sees_every_token():
    class Recorder(list, BaseStreamer):
        def put(self, value):
            self.extend(value.flatten().tolist())

        def end(self):
            self.append("end")

    model, recorder = tiny_model(), Recorder()
    [row] = generate(model, sources(model, batch=1), streamer=recorder)
    assert recorder == [*row.tolist(), "end"]


@pytest.mark.parametrize("design", ["learned", "relative", "rotary"])
def test_assisted_generation_is_greedy_generation(design):
    """The assistant's guesses are checked several at a time, and the cache loses those that were wrong."""
    model = tiny_model(**DESIGNS[design])
    inputs = sources(model, batch=1)
    inputs["input_ids"][0, 2:] = 7
    options = {"max_new_tokens": 9, "min_new_tokens": 9}
    expected = generate(model, inputs, **options)
    assistant = tiny_model(**DESIGNS[design], seed=1)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = 0
    assert torch.equal(generate(model, inputs, **options, assistant_model=assistant), expected)
    widths = []
    model.lm_head.register_forward_hook(lambda module, args, output: widths.append(args[0].shape[1]))
    assert torch.equal(generate(model, inputs, **options, prompt_lookup_num_tokens=3), expected)
    assert max(widths) > 1

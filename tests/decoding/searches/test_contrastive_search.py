"""Tests of contrastive search: it equals the definition, computed anew for each candidate."""

import pytest
import torch
from small_searches import ENDS, MODELS, OURS, last_step, one_of, search_model, search_sources
from tiny_generator import tiny_pair
from tiny_models import tiny_model
from transformers import GenerationConfig

from metaphrase.inference import Generator, contrastive_search
from metaphrase.inference.batches import decode

OPTIONS = {"max_new_tokens": 8, "eos_token_id": ENDS, "return_dict_in_generate": True, "do_sample": False}


def contrastive(model, inputs, alpha, top_k, **options):
    search = {"custom_generate": contrastive_search, "penalty_alpha": alpha, "top_k": top_k}
    return model.generate(**inputs, **OPTIONS | options, **search)


def plainly(model, source, alpha, top_k, count, prompt, banned=()):
    """Return ids and the sum of log-probabilities by the definition, with a whole pass for each candidate."""
    ids, total = list(prompt), 0.0
    for _ in range(count):
        log_probs = last_step(model, source, torch.tensor([ids]))[0][0]
        log_probs[list(banned)] = -torch.inf
        log_probs = log_probs.log_softmax(-1)
        best = None
        for log_prob, token in zip(*(column.tolist() for column in log_probs.topk(top_k)), strict=True):
            if log_prob == float("-inf"):
                continue
            hidden = last_step(model, source, torch.tensor([[*ids, token]]))[1][0]
            similarity = max(torch.cosine_similarity(hidden[-1], earlier, dim=0).item() for earlier in hidden[:-1])
            value = (1 - alpha) * torch.tensor(log_prob).exp().item() - alpha * similarity
            if best is None or value > best[0]:
                best = (value, token, log_prob)
        ids.append(best[1])
        total += best[2]
        if best[1] in ENDS:
            break
    return ids, total


@pytest.mark.parametrize("top_k", [1, 5, 31])
@pytest.mark.parametrize("name", MODELS)
def test_without_contrast_it_is_greedy_search(name, top_k):
    model = search_model(name)
    inputs = search_sources(model)
    expected = model.generate(**inputs, **OPTIONS)
    assert contrastive(model, inputs, 0.0, top_k).sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize(
    ("name", "alpha", "top_k"),
    [("sinusoidal", 0.3, 3), ("sinusoidal", 0.7, 5), ("relative", 0.7, 4), ("bart", 0.7, 4), ("t5", 0.7, 4)],
)
def test_targets_are_those_of_the_definition(name, alpha, top_k, states):
    model = search_model(name)
    inputs = search_sources(model, batch=3)
    found = contrastive(model, inputs, alpha, top_k)
    assert states == ["BeamState" if name in OURS else "CachedState"]
    greedy = model.generate(**inputs, **OPTIONS).sequences
    assert found.sequences.tolist() != greedy.tolist()
    for row, given in enumerate(found.sequences.tolist()):
        ids, score = plainly(
            search_model(name, True), one_of(inputs, row), alpha, top_k, 8, [model.config.decoder_start_token_id]
        )
        assert given == ids + [model.config.pad_token_id] * (len(given) - len(ids))
        assert found.sequences_scores[row].item() == pytest.approx(score, abs=1e-3)


def test_an_end_that_the_decoder_has_no_position_for_is_written():
    pair = tiny_pair()
    design = {"position_embedding_type": "learned", "max_position_embeddings": 9}
    for seed in range(20):
        generator = Generator(tiny_model(seed=seed, **pair.config_fields(), **design), pair)
        sources = generator.encode(["a cat"])
        # Nine tokens are read, of which one is the start; what comes next is written.
        [[best]] = decode(generator.model, sources, num_beams=1, max_new_tokens=9, eos_token_id=None)
        if best.ids[8] not in best.ids[:8]:
            break
    options = {"penalty_alpha": 0.0, "top_k": 2, "max_new_tokens": 12}
    [[same]] = decode(generator.model, sources, eos_token_id=best.ids[8], **options)
    assert same.ids == best.ids and len(best.ids) == 9
    other = next(token for token in range(4, 20) if token not in best.ids)
    with pytest.raises(ValueError, match="must not be longer than `max_position_embeddings`"):
        decode(generator.model, sources, eos_token_id=other, **options)


@pytest.mark.parametrize("name", ["sinusoidal", "bart"])
def test_what_processors_rule_out_is_no_candidate_however_unlike_it_is(name):
    model = search_model(name)
    inputs = search_sources(model)
    banned = [token for token in range(37) if token not in (4, 20)]
    found = contrastive(model, inputs, 0.9, 6, suppress_tokens=banned).sequences
    for row in range(len(found)):
        ids, _ = plainly(
            search_model(name, True), one_of(inputs, row), 0.9, 6, 8, [model.config.decoder_start_token_id], banned
        )
        assert found[row, : len(ids)].tolist() == ids and set(ids[1:]) <= {4, 20}


def test_a_prompt_counts_among_the_tokens_before():
    model = search_model("sinusoidal")
    source = one_of(search_sources(model), 1)
    prompt = [model.config.decoder_start_token_id, 7, 20]
    found = contrastive(model, source, 0.6, 4, max_new_tokens=3, decoder_input_ids=torch.tensor([prompt]))
    ids, _ = plainly(search_model("sinusoidal", True), source, 0.6, 4, 3, prompt)
    assert found.sequences[0].tolist() == ids


def test_settings_of_the_configuration_are_taken_and_only_ids_come_without_a_dictionary():
    model = search_model("sinusoidal")
    inputs = search_sources(model)
    config = GenerationConfig(penalty_alpha=0.6, top_k=4, max_new_tokens=8, eos_token_id=ENDS, pad_token_id=0)
    config.decoder_start_token_id = model.config.decoder_start_token_id
    ids = model.generate(**inputs, generation_config=config, custom_generate=contrastive_search)
    assert ids.tolist() == contrastive(model, inputs, 0.6, 4).sequences.tolist()


@pytest.mark.parametrize(
    ("alpha", "top_k", "options", "message"),
    [
        (1.5, 4, {}, r"`penalty_alpha` must be between 0 and 1, got 1.5"),
        (None, 4, {}, r"`penalty_alpha` must be between 0 and 1, got None"),
        (0.5, 0, {}, r"`top_k` must be between 1 and the 37 entries of the vocabulary, got 0"),
        (0.5, 38, {}, r"`top_k` must be between 1 and the 37 entries"),
        (0.5, 4, {"num_beams": 2}, r"`num_beams` must be 1 for contrastive search, got 2"),
        (0.5, 4, {"do_sample": True}, r"`do_sample` must be False"),
    ],
)
def test_errors_name_the_argument(alpha, top_k, options, message):
    model = search_model("sinusoidal")
    with pytest.raises(ValueError, match=message):
        contrastive(model, search_sources(model), alpha, top_k, **options)

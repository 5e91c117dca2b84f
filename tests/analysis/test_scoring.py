import math

import pytest
import torch
from other_families import calmer, generator_of
from tiny_generator import SOURCES, TARGETS, tiny_generator
from tiny_languages import mbart_tokenizer

from metaphrase.analysis import scoring
from metaphrase.analysis.scoring import dual_scores
from metaphrase.inference import cross_attentions, decode
from metaphrase.tokenization import TokenizerPair

FAMILIES = ["metaphrase", "two vocabularies", "t5", "bart", "marian"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def generator(request):
    generator = generator_of(request.param)
    # The large weights amplify rounding in single precision beyond the tolerance.
    generator.model.double()
    return generator


def test_each_token_has_its_probability(generator):
    [score] = generator.score(SOURCES[:1], TARGETS[1:2])
    [ids] = generator.tokenizers.encode_targets(TARGETS[1:2])
    assert score.ids == ids and score.tokens == [*TARGETS[1], "</s>"]
    # One pass per token, each over all the tokens before it.
    expected, source = [], torch.tensor(generator.tokenizers.encode_sources(SOURCES[:1]))
    for place, token in enumerate(ids):
        read = torch.tensor([[generator.model.config.decoder_start_token_id, *ids[:place]]])
        with torch.inference_mode():
            logits = generator.model(input_ids=source, decoder_input_ids=read).logits[0, -1]
        expected.append(logits.double().log_softmax(-1)[token].item())
    assert score.log_probabilities == pytest.approx(expected, abs=TOLERANCE)
    assert min(expected) < -1 and len({round(value, 3) for value in expected}) > len(ids) // 2
    assert score.total == pytest.approx(sum(expected), abs=1e-4)
    assert score.mean == pytest.approx(sum(expected) / len(ids), abs=TOLERANCE)


SIZES = [*((family, {"batch_size": 2}) for family in FAMILIES)]
SIZES += [("metaphrase", {"max_tokens_per_batch": most}) for most in (60, 1)]


@pytest.mark.parametrize(("family", "sizes"), SIZES)
def test_batched_is_alone_in_order(family, sizes, monkeypatch):
    generator = calmer(generator_of(family, **sizes))
    passes, whole = [], scoring.forced_inputs
    monkeypatch.setattr(scoring, "forced_inputs", lambda *a: passes.append(whole(*a)) or passes[-1])
    targets = [TARGETS[3], TARGETS[2], TARGETS[0], "", TARGETS[1]]
    batched = generator.score(SOURCES, targets)
    for batch, width in [inputs[name].shape for inputs in passes for name in ("input_ids", "decoder_input_ids")]:
        assert batch <= sizes.get("batch_size", 64)
        assert batch == 1 or batch * width <= sizes.get("max_tokens_per_batch", 8192)
    assert len(passes) == 5 if sizes.get("max_tokens_per_batch") == 1 else 1 < len(passes) < 5
    everything = calmer(generator_of(family)).score(SOURCES, targets)
    for index, (source, target) in enumerate(zip(SOURCES, targets, strict=True)):
        [alone] = generator.score([source], [target])
        for score in (batched[index], everything[index]):
            assert score.ids == alone.ids
            assert score.log_probabilities == pytest.approx(alone.log_probabilities, abs=TOLERANCE)


def test_mean_is_the_score_of_beam_search(generator):
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "length_penalty": 1.0}
    sources = generator.tokenizers.encode_sources(SOURCES[:2])
    for text, hypotheses in zip(SOURCES, decode(generator.model, sources, return_scores=True, **options), strict=False):
        scores = generator.score([text] * 3, [hypothesis.ids for hypothesis in hypotheses])
        assert [score.mean for score in scores] == pytest.approx([h.score for h in hypotheses], abs=TOLERANCE)


def test_ids_and_texts_and_the_prefix():
    generator, prefixed = tiny_generator(), tiny_generator(source_prefix="the ")
    ids = generator.tokenizers.encode_targets(TARGETS[:2])
    expected = generator.score(["the cat", "the dog"], TARGETS[:2])
    assert generator.score(["the cat", "the dog"], ids) == expected
    assert generator.score(("the cat", "the dog"), [TARGETS[0], tuple(ids[1])]) == expected
    assert prefixed.score(["cat", "dog"], TARGETS[:2]) == expected != generator.score(["cat", "dog"], TARGETS[:2])
    assert generator.score([], []) == []


def test_decoder_starts_as_generation_does():
    generator = tiny_generator()
    before = generator.score(SOURCES[:1], TARGETS[:1])
    generator.model.generation_config.decoder_start_token_id = 7
    [score] = generator.score(SOURCES[:1], TARGETS[:1])
    assert score.log_probabilities != pytest.approx(before[0].log_probabilities, abs=0.01)
    ids = generator.model.generate(torch.tensor(generator.tokenizers.encode_sources(SOURCES[:1])), num_beams=1)
    assert ids[0, 0] == 7
    for config in (generator.model.generation_config, generator.model.config):
        config.decoder_start_token_id = config.bos_token_id = None
    with pytest.raises(ValueError, match="`decoder_start_token_id` must be set"):
        generator.score(SOURCES[:1], TARGETS[:1])


def test_code_of_a_language_behind_the_end_is_left_to_the_start():
    tokenizer = mbart_tokenizer()
    tokenizer.tgt_lang = "de_DE"
    pair = TokenizerPair(tokenizer, tokenizer)
    [whole] = pair.encode_targets(["der hase"])
    end, code = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("de_DE")
    assert whole[-2:] == [end, code]
    # Ids are taken as they are, be there what may behind the end.
    expected = [whole[:-1], whole, pair.encode_targets(["der"])[0][:-1]]
    assert scoring.encode_forced(pair, ["der hase", whole, "der"]) == expected


@pytest.mark.parametrize("call", [lambda generator, *pair: generator.score(*pair), cross_attentions])
def test_pairs_that_do_not_match_are_refused(call):
    for sources, targets, message in (
        (SOURCES[:3], TARGETS[:2], "`sources` and `targets` must be equally many, got 3 and 2"),
        ("a cat", ["eine Katze"], "`sources` must hold one text each, got the single string 'a cat'"),
        (["a cat"], "eine Katze", "`targets` must hold one text each, got the single string"),
        (["a cat", None], TARGETS[:2], "`sources` must hold strings only, got NoneType as text 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call(tiny_generator(), sources, targets)


def test_dual_scores_join_both_directions_and_are_zero_for_pairs_that_are_too_long():
    forward, backward = tiny_generator(), tiny_generator(seed=1)
    pairs = [*zip(SOURCES, TARGETS, strict=True), (SOURCES[0], "a" * 300), ("a" * 300, TARGETS[0])]
    scores = dual_scores(forward, backward, pairs)
    both = zip(forward.score(SOURCES, TARGETS), backward.score(TARGETS, SOURCES), strict=True)
    expected = [math.exp(-abs(f.mean - b.mean) + (f.mean + b.mean) / 2) for f, b in both]
    assert scores == pytest.approx([*expected, 0, 0], rel=1e-4) and len(set(scores)) == 6
    assert dual_scores(forward, backward, []) == []
    with pytest.raises(ValueError, match="must be a single torch model here, got an ensemble"):
        dual_scores(tiny_generator(members=[backward]), backward, pairs)

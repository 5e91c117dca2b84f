import numpy as np
import pytest
import torch
from other_families import calmer, generator_of
from tiny_generator import SOURCES, TARGETS, tiny_generator

from metaphrase.analysis import alignment as alignment_module
from metaphrase.analysis import scoring
from metaphrase.analysis.alignment import AttentionMap, cross_attention, cross_attentions
from metaphrase.inference import alignment_error_rate, format_pharaoh, word_alignment, word_weights
from metaphrase.tokenization import readable_tokens, train_tokenizer

SOURCE, TARGET = SOURCES[0], TARGETS[1]


@pytest.mark.parametrize("family", ["metaphrase", "t5", "bart"])
def test_every_choice_of_layer_and_head(family):
    generator = generator_of(family)
    [source_ids], [ids] = generator.tokenizers.encode_sources([SOURCE]), generator.tokenizers.encode_targets([TARGET])
    decoder_ids = torch.tensor([[generator.model.config.decoder_start_token_id, *ids[:-1]]])
    generator.model.set_attn_implementation("eager")
    inputs = {"input_ids": torch.tensor([source_ids]), "decoder_input_ids": decoder_ids}
    with torch.inference_mode():
        output = generator.model(**inputs, output_attentions=True, use_cache=False)
    expected = torch.cat(output.cross_attentions).numpy()
    layers, heads = expected.shape[:2]
    # Heads and layers that agreed could be mistaken for one another.
    assert np.sort(np.abs(expected - expected[0, 0]).max(axis=(2, 3)).ravel())[1] > 0.01

    def choice(**which):
        return cross_attention(generator, SOURCE, TARGET, **which).weights

    attention = cross_attention(generator, SOURCE, TARGET)
    assert attention.target_tokens == [*TARGET, "</s>"] and attention.source_tokens == [*SOURCE, "</s>"]
    assert attention.weights.dtype == np.float32
    np.testing.assert_allclose(attention.weights.sum(1), 1.0, atol=1e-5)
    np.testing.assert_allclose(choice(), expected.mean((0, 1)), atol=1e-5)
    for layer in range(-layers, layers):
        np.testing.assert_allclose(choice(layer=layer), expected[layer].mean(0), atol=1e-5)
        for head in range(-heads, heads):
            np.testing.assert_allclose(choice(layer=layer, head=head), expected[layer, head], atol=1e-5)


@pytest.mark.parametrize("family", ["metaphrase", "t5", "bart"])
def test_without_a_target_the_model_writes_it(family):
    generator = generator_of(family)
    attention = cross_attention(generator, SOURCE, max_new_tokens=4, num_beams=2)
    assert attention.target == generator.generate([SOURCE], max_new_tokens=4, num_beams=2)[0]
    assert len(attention.target_tokens) == 4 if generator.num_unfinished else len(attention.target_tokens) <= 4


def test_it_is_of_the_start_token_that_was_asked_for():
    generator, other = tiny_generator(), tiny_generator()
    other.model.generation_config.decoder_start_token_id = 5
    options = {"max_new_tokens": 4, "num_beams": 1}
    made = cross_attention(generator, SOURCE, decoder_start_token_id=5, **options)
    expected = cross_attention(other, SOURCE, **options)
    assert made.target == expected.target
    np.testing.assert_array_equal(made.weights, expected.weights)
    assert np.abs(cross_attention(generator, SOURCE, made.target).weights[:2] - made.weights[:2]).max() > 1e-3


@pytest.fixture
def passes(monkeypatch):
    """A list that gets the inputs of each forced pass."""
    passes, whole = [], scoring.forced_inputs
    monkeypatch.setattr(scoring, "forced_inputs", lambda *a: passes.append(whole(*a)) or passes[-1])
    return passes


@pytest.mark.parametrize("family", ["metaphrase", "two vocabularies", "t5", "bart", "marian"])
def test_many_in_a_batch_are_as_each_alone(family, passes):
    generator = calmer(generator_of(family))
    targets = [TARGETS[3], TARGETS[2], TARGETS[0], "", TARGETS[1]]
    maps = cross_attentions(generator, SOURCES, targets)
    assert [len(inputs["input_ids"]) for inputs in passes] == [5] and (passes[0]["attention_mask"] == 0).sum() > 10
    for source, target, many in zip(SOURCES, targets, maps, strict=True):
        alone = cross_attention(generator, source, target)
        np.testing.assert_allclose(many.weights, alone.weights, atol=1e-5)
        assert (many.source, many.target) == (source, target)
        assert (many.source_tokens, many.target_tokens) == (alone.source_tokens, alone.target_tokens)
    assert cross_attentions(generator, []) == []


@pytest.mark.parametrize("sizes", [{"batch_size": 2}, {"max_tokens_per_batch": 60}])
def test_batches_keep_their_limits_and_the_order(sizes, passes, monkeypatch):
    generator, unlimited = (calmer(tiny_generator(**limits)) for limits in (sizes, {}))
    expected = cross_attentions(unlimited, SOURCES, TARGETS, layer=-1)
    monkeypatch.setattr(alignment_module, "MAX_TOKENS_PER_BATCH", 50)
    passes.clear()
    maps = cross_attentions(generator, SOURCES, TARGETS, layer=-1)
    shapes = [inputs["decoder_input_ids"].shape for inputs in passes]
    assert all(batch == 1 or (batch <= 2 and batch * width <= 50) for batch, width in shapes) and len(shapes) > 2
    for given, wanted in zip(maps, expected, strict=True):
        np.testing.assert_allclose(given.weights, wanted.weights, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "kernel", "is_training"),
    [("metaphrase", "sdpa", True), ("metaphrase", "eager", False), ("t5", "sdpa", False)],
)
def test_model_is_left_as_it_was_even_after_an_error(family, kernel, is_training, monkeypatch):
    generator = generator_of(family)
    model = generator.model.train(is_training)
    model.set_attn_implementation(kernel)
    cross_attention(generator, SOURCE, TARGET)
    assert model.training is is_training and model.config._attn_implementation == kernel

    def fail(*arguments, **options):
        assert not model.training and model.config._attn_implementation == "eager"
        raise RuntimeError("no memory left")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        cross_attention(generator, SOURCE, TARGET)
    assert model.training is is_training and model.config._attn_implementation == kernel


def test_byte_level_tokens_are_decoded_one_by_one():
    tokenizer = train_tokenizer(["läuft läuft weg weg"] * 3, vocab_size=275, show_progress=False)
    shown = readable_tokens(tokenizer, tokenizer("läuft weg 中")["input_ids"])
    assert "läuft" in shown and "▁weg" in shown and shown[-1] == "</s>"
    # Three bytes of one character: none can be decoded alone, and none may vanish.
    assert len(shown) == 7 and shown[2] == "▁" and all(len(token) == 1 and token != "\ufffd" for token in shown[3:6])
    assert len(set(shown[3:6])) == 3


# ▁the ▁ca t </s> against ▁die ▁Kat ze ▁da </s>
WEIGHTS = np.array(
    [
        [0.50, 0.20, 0.20, 0.10],
        [0.42, 0.30, 0.20, 0.08],
        [0.10, 0.20, 0.30, 0.40],
        [0.15, 0.05, 0.05, 0.75],
        [0.05, 0.35, 0.40, 0.20],
    ],
    dtype=np.float32,
)


def attention(weights=WEIGHTS, **changes):
    """Return a map of "the cat" and "die Katze da"."""
    fields = {"source": "the cat", "source_words": ["the", "cat"], "source_word_ids": [0, 1, 1, None]}
    fields |= {"source_ids": [3, 4, 5, 2], "source_tokens": ["▁the", "▁ca", "t", "</s>"]}
    fields |= {"target": "die Katze da", "target_words": ["die", "Katze", "da"], "target_word_ids": [0, 1, 1, 2, None]}
    fields |= {"target_ids": [6, 7, 8, 9, 2], "target_tokens": ["▁die", "▁Kat", "ze", "▁da", "</s>"]}
    return AttentionMap(**{"weights": weights} | fields | changes)


def test_source_pieces_are_added_and_target_pieces_averaged():
    expected = [[0.50, 0.40], [0.26, 0.50], [0.15, 0.10]]
    np.testing.assert_allclose(word_weights(attention()), expected, atol=1e-6)
    # No single token of "cat" outweighs "the" in the row of "▁Kat". The end of sequence counts for nothing.
    assert word_alignment(attention()) == [(0, 0), (0, 2), (1, 1)]
    assert format_pharaoh(word_alignment(attention())) == "0-0 0-2 1-1"


def test_first_of_equals_wins_and_words_without_weight_have_no_link():
    tied = np.array([[0.4, 0.2, 0.2, 0.2], [0, 0, 0, 1], [0, 0, 0, 1], [0.2, 0.4, 0.4, 0], [1, 0, 0, 0]])
    assert word_alignment(attention(tied)) == [(0, 0), (1, 2)]
    assert word_alignment(attention(target_word_ids=[0, 0, 0, 2, None])) == [(0, 2), (1, 0)]
    assert word_alignment(attention(source_words=[], source_word_ids=[None] * 4)) == []
    assert format_pharaoh([]) == ""
    for side in ("source", "target"):
        with pytest.raises(ValueError, match=f"The tokens of the {side} must make up its words, got '"):
            word_alignment(attention(**{f"{side}_word_ids": None}))


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "char", "pretokenized"])
def test_words_of_a_model(kind, joint):
    generator = tiny_generator(joint=joint, kind=kind, source_prefix="the ")
    given = cross_attention(generator, SOURCES[3], TARGETS[3])
    assert given.source == SOURCES[3] and given.source_words == given.source.split()
    assert given.target_words == TARGETS[3].split()
    weights = word_weights(given)
    # The prefix and the end of sequence have the rest of the weight, and nothing else is missing.
    silent = [place for place, word in enumerate(given.source_word_ids) if word is None]
    rows = [[place for place, word in enumerate(given.target_word_ids) if word == index] for index in range(6)]
    missing = [given.weights[row][:, silent].sum(axis=1).mean() for row in rows]
    assert 2 <= len(silent) <= 5 and max(missing) > 0.01
    np.testing.assert_allclose(weights.sum(axis=1), 1 - np.array(missing), atol=1e-5)
    links = word_alignment(given)
    assert sorted(target for _, target in links) == list(range(6)) and links == sorted(links)
    written = cross_attention(generator, SOURCES[0], num_beams=3, max_new_tokens=12)
    assert written.target_words == written.target.split()
    assert set(written.target_word_ids) - {None} == set(range(len(written.target_words)))


def test_alignment_error_rate():
    sure, possible = [[(0, 0), (1, 1)], [(0, 0)]], [[(0, 1)], []]
    assert alignment_error_rate(sure, sure, possible) == 0
    # A and S: 1; A and P: 2; A: 3; S: 3
    assert alignment_error_rate([[(0, 0), (0, 1)], [(2, 2)]], sure, possible) == pytest.approx(1 - 3 / 6)
    assert alignment_error_rate([[], []], sure, possible) == 1
    with pytest.raises(ValueError, match="longer"):
        alignment_error_rate([[]], sure, possible)

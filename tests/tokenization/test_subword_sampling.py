"""Tests of BPE-dropout: exact probabilities on a small vocabulary, and texts that stay the same."""

import pickle
import random
from collections import Counter

import pytest
from tiny_generator import SOURCES, TARGETS
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from metaphrase.tokenization import TokenizerPair, train_tokenizer
from metaphrase.tokenization.subword_sampling import SubwordSampler

TEXTS = [*SOURCES, *TARGETS, "the cats, dogs' dog's <2de> </s> 12 Katzen!"]


def wrap(model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def drawn_shares(tokenizer, alpha, word, num_draws=20_000):
    """Return the share of each segmentation of a word."""
    sampler, generator = SubwordSampler(tokenizer, alpha), random.Random(0)
    [encoding] = tokenizer([word], add_special_tokens=False).encodings
    draws = Counter(tuple(sampler(encoding, generator)) for _ in range(num_draws))
    return {" ".join(tokenizer.convert_ids_to_tokens(ids)): count / num_draws for ids, count in draws.items()}


@pytest.mark.parametrize("merges", [[("a", "b"), ("b", "c"), ("ab", "c")], [("b", "c"), ("a", "b"), ("a", "bc")]])
def test_bpe_dropout_has_the_probabilities_of_the_paper(merges):
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", "a", "b", "c", "ab", "bc", "abc"])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>")
    shares = drawn_shares(wrap(model), 0.25, "abc")
    # The merge that was learned first comes first, at any place of the word. A state whose merges are all skipped is the end.
    expected = {"abc": 0.75 * 0.75, "ab c": 0.75 * 0.25, "a bc": 0.25 * 0.75, "a b c": 0.25 * 0.25}
    assert shares == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe"])
def test_texts_stay_and_segmentations_differ(kind):
    texts = TEXTS * 3
    tokenizer = train_tokenizer(
        texts,
        kind=kind,
        vocab_size=300 if kind == "byte_bpe" else 70,
        additional_special_tokens=["<2de>"],
        show_progress=False,
    )
    pair = TokenizerPair(tokenizer, tokenizer)
    # A skull is unknown, and its word stays.
    texts = [*texts, "the ☠dog"]
    plain, generator = pair.encode_targets(texts), random.Random(1)
    sampler = SubwordSampler(tokenizer, 0.3)
    rows = pair.encode_targets(texts, lambda _, encoding: sampler(encoding, generator))
    assert pair.decode_targets(rows) == pair.decode_targets(plain)
    assert sum(row != other for row, other in zip(rows, plain, strict=True)) > len(texts) / 4
    language = tokenizer.convert_tokens_to_ids("<2de>")
    assert [row.count(language) for row in rows] == [row.count(language) for row in plain]
    # A copy for a worker draws the same, whatever it has seen before.
    twin, draws = pickle.loads(pickle.dumps(sampler)), []
    for copy in (sampler, twin):
        generator = random.Random(2)
        draws.append(pair.encode_targets(texts, lambda _, encoding, copy=copy: copy(encoding, generator)))  # noqa: B023
    assert draws[0] == draws[1]


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe"])
def test_bpe_without_dropout_is_the_plain_segmentation(kind):
    tokenizer = train_tokenizer(TEXTS * 3, kind=kind, vocab_size=330, show_progress=False)
    pair, sampler = TokenizerPair(tokenizer, tokenizer), SubwordSampler(tokenizer, 0)
    rows = pair.encode_sources(TEXTS, lambda _, encoding: sampler(encoding, random.Random(0)))
    assert rows == pair.encode_sources(TEXTS)


@pytest.mark.parametrize("kind", ["byte", "unigram"])
def test_a_tokenizer_without_merges_is_refused(kind):
    tokenizer = train_tokenizer(TEXTS, kind=kind, show_progress=False)
    with pytest.raises(ValueError, match="`subword_sampling` must come with a tokenizer"):
        SubwordSampler(tokenizer, 0.1)

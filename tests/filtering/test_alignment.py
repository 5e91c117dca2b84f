import random

import numpy as np
import pytest

from metaphrase.filtering import alignment
from metaphrase.filtering.alignment import AlignmentModel, learn_lexicon, learn_terms, make_vocabulary_map
from metaphrase.tokenization import TokenizerPair


def make_pairs(number, seed=0, num_words=400):
    """Return pairs of an artificial language: each word has a translation, which may stand anywhere."""
    generator = random.Random(seed)
    pairs = []
    for _ in range(number):
        words = [int(num_words * generator.random() ** 2) for _ in range(generator.randint(4, 9))]
        target = [f"t{word}" for word in words if generator.random() < 0.9] or ["t0"]
        generator.shuffle(target)
        pairs.append((" ".join(f"s{word}" for word in words), " ".join(target)))
    return pairs


@pytest.fixture(scope="module")
def noisy():
    """Return pairs of which the last 600 of 3,600 are misaligned, and their order."""
    pairs = make_pairs(3600)
    pairs[3000:] = [(source, target) for (source, _), (_, target) in zip(pairs[3000:], make_pairs(600, 1), strict=True)]
    order = np.random.default_rng(0).permutation(len(pairs))
    return [pairs[index] for index in order], order >= 3000


def test_misaligned_pairs_are_found(noisy):
    pairs, is_noise = noisy
    model = AlignmentModel(pairs)
    is_low = model.scores(pairs) < model.threshold
    assert is_low[is_noise].mean() > 0.95 and is_low[~is_noise].mean() < 0.01
    assert 0.05 < model.noise_share < 600 / 3600 + 0.02


def test_a_clean_corpus_loses_hardly_a_pair():
    pairs = make_pairs(3600)
    model = AlignmentModel(pairs)
    assert (model.scores(pairs) < model.threshold).mean() < 0.002


def test_scores_do_not_depend_on_batches_or_repetition(noisy, monkeypatch):
    pairs = noisy[0][:2000]
    model, again = AlignmentModel(pairs), AlignmentModel(pairs)
    scores = model.scores(pairs)
    assert np.array_equal(scores, again.scores(pairs))
    monkeypatch.setattr(alignment, "_PAIRS_PER_BATCH", 7)
    assert np.array_equal(scores, model.scores(pairs))
    assert np.array_equal(scores[:5], np.concatenate([model.scores([pair]) for pair in pairs[:5]]))
    assert model.scores([]).size == 0
    # Words that the model does not know are no error.
    assert np.isfinite(model.scores([("unknown words", "palabras"), ("", "t1")])).all()


@pytest.fixture(scope="module")
def pairs():
    return make_pairs(3000, num_words=200)


@pytest.fixture(scope="module", params=["word", "byte_bpe"])
def tokenizers(request, pairs):
    sides = [list(side) for side in zip(*pairs, strict=True)]
    return TokenizerPair.train(*sides, kind=request.param, joint=request.param == "byte_bpe", show_progress=False)


def test_sources_permit_their_targets(pairs, tokenizers):
    vocabulary_map = make_vocabulary_map(pairs, tokenizers, num_per_token=8, num_frequent=5)
    new_pairs = make_pairs(300, seed=1, num_words=200)
    sources, targets = (list(side) for side in zip(*new_pairs, strict=True))
    permitted = [set(vocabulary_map.permitted([ids]).tolist()) for ids in tokenizers.encode_sources(sources)]
    rows = tokenizers.encode_targets(targets)
    assert np.mean([set(row) <= ids for row, ids in zip(rows, permitted, strict=True)]) > 0.97
    always = set(vocabulary_map.permitted([[]]).tolist())
    # The pairs have some 200 words.
    assert np.mean([len(ids - always) for ids in permitted]) < 60
    names = tokenizers.target.get_vocab()
    assert {*tokenizers.target.all_special_ids, *(names[name] for name in names if len(name) == 1)} <= always
    if tokenizers.is_joint:
        token = names["s"]
        assert token in set(vocabulary_map.permitted([[token]]).tolist())


def test_terms_translate_each_other(pairs):
    letters = str.maketrans("0123456789", "abcdefghij")
    texts = [(source.translate(letters).title(), target.translate(letters)) for source, target in pairs]
    terms = learn_terms(texts)
    # Each word has one translation, `saj` has `taj`. The most frequent words and rare ones are left out.
    assert 150 < len(terms) <= 180
    assert all(f"t{word[1:]}" in partners for word, partners in terms.items())
    assert np.mean([len(partners) for partners in terms.values()]) < 1.1
    assert learn_terms([("a b", "c d")] * 2) == learn_terms([("1 2", "3 4")] * 9) == {}


def test_a_term_is_a_probable_partner_in_both_directions():
    names = [first + second for first in "abcdef" for second in "abcde"]
    # Each of 30 words stands beside `zu`, which stands for none of them.
    pairs = [(f"{name}x", f"{name}y zu") for name in names for _ in range(6)]
    assert learn_terms(pairs + [("and the of in", "und der von im")] * 200) == {
        f"{name}x": [f"{name}y"] for name in names
    }


def test_terms_are_whole_words():
    words = {"हिन्दी": "Hindi", "भाषा": "Sprache", "किताब": "Buch", "मेज": "Tisch"}
    pairs = [(f"{one} {two}", f"{words[one]} {words[two]}") for one in words for two in words if one != two]
    terms = learn_terms(pairs * 5)
    targets = set(map(str.casefold, words.values()))
    assert terms and all(word in words and targets.issuperset(partners) for word, partners in terms.items())
    # Without spaces, there are no words to take.
    assert learn_terms([("我喜欢猫", "ich mag Katzen"), ("我喜欢狗", "ich mag Hunde")] * 9) == {}


def test_lexicon_is_that_of_the_textbook():
    """Compare with the two sums of IBM Model 1, written out."""
    sources, targets = [[1, 2, 9], [1, 9], [2, 3, 3, 9]], [[5, 6], [5], [6, 7]]
    table = {(s, t): 1.0 for pair in zip(sources, targets, strict=True) for s in pair[0] for t in pair[1]}
    for _ in range(alignment._LEXICON_ITERATIONS):
        counts = dict.fromkeys(table, 0.0)
        for source, target in zip(sources, targets, strict=True):
            for t in target:
                total = sum(table[s, t] for s in source)
                for s in source:
                    counts[s, t] += table[s, t] / total
        sums = {s: sum(count for (other, _), count in counts.items() if other == s) for s, _ in counts}
        table = {(s, t): count / sums[s] for (s, t), count in counts.items()}
    lengths = np.array([list(map(len, side)) for side in (sources, targets)])
    words, partners, probabilities = learn_lexicon(np.concatenate(sources), np.concatenate(targets), lengths, 10)
    assert list(zip(words, partners, strict=True)) == sorted(table)
    assert probabilities == pytest.approx([table[key] for key in sorted(table)])

import pickle
import random
from collections import Counter
from itertools import chain

import datasets
import numpy as np
import pytest
from tiny_generator import SOURCES, TARGETS
from tokenizers import AddedToken, Tokenizer, models
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from metaphrase.augmentation.augmentation import AugmentedPairs, Augmenter, SubwordSampler
from metaphrase.augmentation.rare_words import RareWords
from metaphrase.data.encoding import encode_pairs
from metaphrase.data.pairs import PairSource
from metaphrase.data.token_budget import PairStream
from metaphrase.tokenization import TokenizerPair, train_tokenizer

NOUNS, VERBS = ("dog", "cat", "bird", "fish", "cow"), ("runs", "sees", "eats", "sleeps")
PAIRS = [(f"the {noun} {verb} here.", f"{noun} der {verb} hier!") for noun in NOUNS for verb in VERBS]
LIMITS = 40, 40


@pytest.fixture(scope="module")
def tokenizers():
    sides = zip(*PAIRS * 3, strict=True)
    return TokenizerPair.train(*sides, vocab_size=400, additional_special_tokens=["<2de>"], show_progress=False)


@pytest.fixture(scope="module")
def encoded(tokenizers):
    texts = datasets.Dataset.from_list([{"source": source, "target": target} for source, target in PAIRS])
    return encode_pairs(texts, tokenizers, max_source_length=40, max_target_length=40, keep_text=True)[0]


def make_pairs(encoded, tokenizers, **options):
    return AugmentedPairs(encoded, Augmenter(tokenizers, 7, LIMITS, **{"subword_sampling": 0.2, **options}))


def test_a_pair_depends_on_its_row_and_the_epoch_alone(encoded, tokenizers):
    pairs = make_pairs(encoded, tokenizers)
    alone = [pairs[row] for row in range(len(pairs))]
    assert pairs.__getitems__([3, 1, 2]) == [alone[3], alone[1], alone[2]]
    loader = DataLoader(pairs, 3, num_workers=1, persistent_workers=True, collate_fn=list)
    assert list(chain.from_iterable(loader)) == alone
    pairs.set_epoch(1)
    second = list(chain.from_iterable(loader))
    assert second == [pairs[row] for row in range(len(pairs))] and second != alone
    assert make_pairs(encoded, tokenizers)[5] == alone[5]
    # Other segmentations of the same texts.
    assert second[0]["labels"] != alone[0]["labels"]
    assert tokenizers.decode_targets([pair["labels"] for pair in second]) == [target for _, target in PAIRS]


def test_lengths_to_plan_by_are_those_of_the_mean(encoded, tokenizers):
    pairs = make_pairs(encoded, tokenizers)
    drawn = []
    for epoch in range(10):
        pairs.set_epoch(epoch)
        drawn += [len(pairs[row]["input_ids"]) for row in range(len(pairs))]
    planned, plain = np.mean(pairs["source_length"][:]), np.mean(encoded["source_length"][:])
    assert plain + 1 < planned and planned == pytest.approx(np.mean(drawn), abs=1)


def test_a_longer_side_stays_plain(encoded, tokenizers):
    limits = max(encoded["source_length"][:]), max(encoded["target_length"][:])
    pairs = AugmentedPairs(encoded, Augmenter(tokenizers, 7, limits, 0.5))
    rows = [pairs[row] for row in range(len(pairs))]
    lengths = [[len(row[name]) for row in rows] for name in ("input_ids", "labels")]
    assert max(lengths[0]) == limits[0] and max(lengths[1]) == limits[1]
    assert max(pairs["source_length"]) == limits[0]
    longest = int(np.argmax(encoded["source_length"][:]))
    assert pairs[longest]["input_ids"] == encoded[longest]["input_ids"]


@pytest.mark.parametrize("limits", [(12, 40), (40, 12)])
def test_a_change_of_both_texts_reaches_no_side_alone(encoded, tokenizers, limits):
    pairs = AugmentedPairs(encoded, Augmenter(tokenizers, 7, limits, rates={"uppercase": 1.0}))
    assert len(tokenizers.encode_sources([PAIRS[0][0].upper()])[0]) > 12
    assert [pairs[row]["labels"] for row in range(len(pairs))] == encoded["labels"][:]
    assert [pairs[row]["input_ids"] for row in range(len(pairs))] == encoded["input_ids"][:]


def test_a_stream_draws_anew_in_each_pass(encoded, tokenizers, tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in [*PAIRS, ("", "empty")]), encoding="utf-8")
    augmenter = Augmenter(tokenizers, 7, LIMITS, 0.2)
    rules = {"max_source_length": 40, "max_target_length": 40}
    stream = PairStream(PairSource(file=tmp_path / "train.tsv"), tokenizers, augmenter, **rules)
    first, again, second = ([pair for _, chunk in stream.chunks(number) for pair in chunk] for number in (0, 0, 1))
    assert first == again != second and stream.report.empty_source == 1
    pairs = AugmentedPairs(encoded, augmenter)
    assert first == [pairs[row] for row in range(len(pairs))]


def changed_texts(tokenizers, source, target, count=2000, prefixes=(), **rates):
    augmenter, generator = Augmenter(tokenizers, 0, LIMITS, rates=rates, prefixes=prefixes), random.Random(1)
    return [augmenter.change_texts(source, target, generator) for _ in range(count)]


def test_case_and_punctuation_change_at_their_rates(tokenizers):
    source, target = "the dog runs.", "Der Hund läuft!"
    texts = changed_texts(tokenizers, source, target, uppercase=0.1, titlecase=0.2, missing_punctuation=0.3)
    has_upper = np.mean([pair[0].startswith("THE DOG RUNS") and pair[1].startswith("DER HUND LÄUFT") for pair in texts])
    has_title = np.mean([pair[0].startswith("The Dog Runs") and pair[1].startswith("Der Hund Läuft") for pair in texts])
    is_bare = np.mean([pair[0][-1] != "." and pair[1][-1] != "!" for pair in texts])
    assert (has_upper, has_title, is_bare) == pytest.approx((0.1, 0.2, 0.3), abs=0.03)
    # A pair with punctuation on one side alone keeps it.
    assert set(changed_texts(tokenizers, "dog.", "Hund", missing_punctuation=1.0)) == {("dog.", "Hund")}


def test_typos_change_a_source_by_letters_near(tokenizers):
    texts = changed_texts(tokenizers, "dog 12", "Hund 12", typos=0.5)
    assert {target for _, target in texts} == {"Hund 12"}
    assert {source for source, _ in texts} == {"dog 12", "odg 12", "og 12", "ddog 12", "dgo 12", "dg 12", "doog 12"}
    assert np.mean([source != "dog 12" for source, _ in texts]) == pytest.approx(0.5, abs=0.04)


def test_rare_words_come_at_their_rate_on_both_sides_but_not_in_prefixes_and_special_tokens(tokenizers):
    rare, generator = RareWords({"dog": "Hund", "cat": "Katze"}, {"dog": {"cat": 1}}), random.Random(1)
    augmenter = Augmenter(tokenizers, 0, LIMITS, rates={"rare_words": 0.3}, combinations=(rare, None))
    texts = [augmenter.change_texts("dog runs", "Hund läuft", generator) for _ in range(2000)]
    assert set(texts) == {("dog runs", "Hund läuft"), ("cat runs", "Katze läuft")}
    assert np.mean([source == "cat runs" for source, _ in texts]) == pytest.approx(0.3, abs=0.03)
    options = {"rates": {"rare_words": 1.0}, "combinations": (rare, None), "prefixes": ["dog says: "]}
    augmenter = Augmenter(tokenizers, 0, LIMITS, **options)
    changed = augmenter.change_texts("dog says: <2de> a  dog, a dog", "Hund und  Hund", generator)
    assert changed == ("dog says: <2de> a  dog, a cat", "Katze und  Katze")
    # The word stands in the prefix alone.
    unchanged = "dog says: a bird", "Hund"
    assert augmenter.change_texts(*unchanged, generator) == unchanged


def test_long_pairs_get_several_rare_words(tokenizers):
    translations = {"dog": "Hund", "cat": "Katze", "runs": "läuft", "sleeps": "schläft"}
    rare, generator = RareWords(translations, {"dog": {"cat": 1}, "runs": {"sleeps": 1}}), random.Random(1)
    augmenter = Augmenter(tokenizers, 0, LIMITS, rates={"rare_words": 1.0}, combinations=(rare, None))
    short, long = (
        {augmenter.change_texts(f"dog runs{end}", f"Hund läuft{end}", generator) for _ in range(50)}
        for end in ("", " ." * 10)
    )
    assert short == {("cat runs", "Katze läuft"), ("dog sleeps", "Hund schläft")}
    assert ("cat sleeps" + " ." * 10, "Katze schläft" + " ." * 10) in long


def test_terms_stand_behind_the_words_that_they_translate(tokenizers):
    terms = {"dog": ["hund", "rüde"], "cat": ["katze"], "said": ["sagte"]}
    source, target = "<2de> The Dog, the cat and the bird", "Der Hund, die Katze und der Vogel"
    options = {"terms": terms, "prefixes": ["the dog said: "]}
    augmenter, generator = Augmenter(tokenizers, 0, LIMITS, rates={"terms": 0.5}, **options), random.Random(1)
    texts = [augmenter.change_texts(source, target, generator) for _ in range(2000)]
    assert {pair[1] for pair in texts} == {target}
    dog, cat = "Dog <term> Hund </term>", "cat <term> Katze </term>"
    changed = [(dog, "cat"), ("Dog", cat), (dog, cat)]
    expected = {f"<2de> The {first}, the {second} and the bird" for first, second in changed}
    assert {pair[0] for pair in texts} == {source, *expected}
    assert np.mean([pair[0] != source for pair in texts]) == pytest.approx(0.5, abs=0.04)
    # A prefix gets no term, nor does a word whose partner is not in the target.
    assert augmenter.change_texts("the dog said: cat", "Hund sagte Kater", generator)[0] == "the dog said: cat"


def test_prefixes_and_special_tokens_stay(tokenizers):
    options = {"prefixes": ["say", "say it: "], "uppercase": 1.0, "typos": 1.0}
    texts = changed_texts(tokenizers, "say it: <2de> dog", "hund", count=50, **options)
    assert all(source.startswith("say it: <2de> ") and source.isascii() for source, _ in texts)
    assert {source[14:] for source, _ in texts} == {"ODG", "OG", "DDOG", "DGO", "DG", "DOOG"}
    assert {target for _, target in texts} == {"HUND"}


TEXTS = [*SOURCES, *TARGETS, "the cats, dogs' dog's <2de> </s> 12 Katzen!"]


@pytest.mark.parametrize("merges", [[("a", "b"), ("b", "c"), ("ab", "c")], [("b", "c"), ("a", "b"), ("a", "bc")]])
def test_bpe_dropout_has_the_probabilities_of_the_paper(merges):
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", "a", "b", "c", "ab", "bc", "abc"])}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer, generator = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), random.Random(0)
    sampler, [encoding] = SubwordSampler(tokenizer, 0.25), tokenizer(["abc"], add_special_tokens=False).encodings
    draws = Counter(tuple(sampler(encoding, generator)) for _ in range(20_000))
    shares = {" ".join(tokenizer.convert_ids_to_tokens(ids)): count / 20_000 for ids, count in draws.items()}
    # The merge that was learned first comes first, at any place of the word. A state whose merges are all skipped is the end.
    expected = {"abc": 0.75 * 0.75, "ab c": 0.75 * 0.25, "a bc": 0.25 * 0.75, "a b c": 0.25 * 0.25}
    assert shares == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe"])
def test_texts_stay_and_segmentations_differ(kind):
    texts, size = TEXTS * 3, 300 if kind == "byte_bpe" else 70
    options = {"additional_special_tokens": ["<2de>"], "show_progress": False}
    tokenizer = train_tokenizer(texts, kind=kind, vocab_size=size, **options)
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


AGENTS, LEMMAS = ("cat", "dog", "bird"), {"saw": "see", "liked": "like"}
SENTENCES = [
    (f"the {agent} {verb} the {theme} .", f"{lemma} ( {agent} , {theme} )")
    for agent in AGENTS
    for verb, lemma in LEMMAS.items()
    for theme in AGENTS
    if agent != theme
]
# Each is seen once: a noun before a verb, and a verb between nouns.
SENTENCES += [
    ("the shark saw the dog .", "see ( shark , dog )"),
    ("the cat blessed the bird .", "bless ( cat , bird )"),
]


def test_a_rare_word_replaces_words_that_are_seen_in_all_its_contexts():
    rare = RareWords.learn(SENTENCES)
    assert rare.translations["blessed"] == "bless" and rare.translations["shark"] == "shark"
    new = {old: set(words) for old, words in rare.substitutes.items()}
    assert "blessed" in new["saw"] & new["liked"]
    assert "shark" in new["cat"]
    # No verb takes the place of a noun, and no frequent word that of a rare one.
    assert "shark" not in new["saw"] | new["liked"] and "blessed" not in new["cat"]
    assert not {"shark", "blessed", "the", "."} & set(new)


def test_a_translation_is_the_word_that_goes_with_a_word_the_most():
    # `(` stands in all targets. Of two words that always stand together, the one of equal spelling is the translation,
    # and `map` translates `map`, not `old`.
    pairs = [("red cat", "( cat red )"), ("red dog", "( dog red )"), ("old map", "( map ancient )"), ("a b", "( x y )")]
    translations = RareWords.learn(pairs).translations
    assert translations["red"] == "red" and translations["cat"] == "cat" and translations["map"] == "map"
    assert translations["old"] == "ancient"
    assert not {"a", "b"} & set(translations)
    # No target word stands in nearly all targets of a word.
    assert RareWords.learn([("so a", "X"), ("so b", "Y"), ("so c", "X")]).translations.get("so") is None


@pytest.mark.parametrize(
    ("pairs", "substitutes"),
    [
        # Words of the same contexts do not replace each other.
        ([("a x", "X ( )"), ("a y", "Y ( )")], {}),
        # Both neighbors of a word are its contexts.
        ([("a x b", "X"), ("c x d", "X"), ("a y d", "Y"), ("a z e", "Z"), ("f v b", "V")], {"x": {"y": 1}}),
        # Two words stand behind a translation: Y has the context of X, Z another second word.
        ([("a x", "X ( b"), ("c x", "X ( b"), ("a y", "Y ( b"), ("a z", "Z ( d"), ("q", "d")], {"x": {"y": 1}}),
    ],
)
def test_contexts_of_words(pairs, substitutes):
    assert RareWords.learn(pairs).substitutes == substitutes


def test_rarer_words_are_drawn_more_often():
    rare = RareWords({"saw": "see", "met": "meet", "blessed": "bless"}, {"saw": {"met": 99, "blessed": 1}})
    draws = [rare.draw("he saw", "see ( he )", random.Random(seed)) for seed in range(500)]
    assert set(draws) == {(("saw", "met"), ("see", "meet")), (("saw", "blessed"), ("see", "bless"))}
    assert draws.count((("saw", "met"), ("see", "meet"))) < 25


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # No word that may be replaced; two words with one translation; no translation in the target.
        ("he ran", "run ( he )"),
        ("he saw that she sees", "see ( he , see ( she ) )"),
        ("he saw", "look ( he )"),
    ],
)
def test_a_pair_without_a_safe_replacement_has_none(source, target):
    rare = RareWords({"saw": "see", "sees": "see", "blessed": "bless"}, {"saw": {"blessed": 1}})
    assert rare.draw(source, target, random.Random(0)) is None

import hashlib
import json
import re
from collections import Counter

import pytest

from metaphrase.demo import corpus as demo
from metaphrase.demo.corpus import Sampler, core_of, make_demo_corpus, make_demo_summaries
from metaphrase.demo.grammar import to_english, to_german

CORES = {
    "Although the brother wants to know this castle, the small king has the brown suitcase.": "The king has the suitcase.",
    "They believe that the postcards must be new.": "The postcards must be new.",
    "The hungry king whom I drew called the happy boy.": "The king called the boy.",
    "Every small boy opens this door and a teacher sells the woman's small cookie.": "Every boy opens this door.",
    "Did the teacher send their doctors my shoe?": "Did the teacher send their doctors my shoe?",
    "Tomorrow the old neighbors cannot laugh.": "The neighbors cannot laugh.",
    "The sisters went to the rooms because you did not swim.": "The sisters went to the rooms.",
}


@pytest.fixture(scope="module")
def drawn():
    """Sentences in the order of the summaries."""
    sampler = Sampler(1)
    return {to_english(sentence): sentence for sentence in (sampler.sentence() for _ in range(8000))}


@pytest.fixture(scope="module")
def corpus():
    return make_demo_corpus(num_train=6000, num_validation=300, num_test=600)


@pytest.fixture(scope="module")
def summaries():
    return make_demo_summaries(num_train=60, num_validation=20, num_test=60)


def test_one_combination_in_eight_is_held_out(drawn):
    distinct = {pair for sentence in drawn.values() for pair in demo.combinations(sentence)}
    shares = Counter((type(first), demo.split_of_combination((first, second))) for first, second in distinct)
    for kind in {type(first) for first, _ in distinct}:
        held_out = 1 - shares[kind, "train"] / sum(shares[kind, split] for split in ("train", "validation", "test"))
        assert 0.10 < held_out < 0.15


def test_lines_are_distinct_and_of_held_out_splits_familiar(corpus):
    assert {split: len(pairs) for split, pairs in corpus.items()} == {"train": 6000, "validation": 300, "test": 600}
    assert corpus["test"][0] == ("The cat is black.", "Die Katze ist schwarz.")
    sources = [english for pairs in corpus.values() for english, _ in pairs]
    assert len(set(sources)) == len(sources)
    line = re.compile(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüß']*(,? [A-Za-zÄÖÜäöüß']+)+[.?]")
    for pairs in corpus.values():
        for english, german in pairs:
            assert line.fullmatch(english) and line.fullmatch(german) and english[-1] == german[-1]
            assert demo.MIN_WORDS <= len(english.split()) <= demo.MAX_WORDS
    for side in (0, 1):
        frequencies = Counter(word for pair in corpus["train"] for word in demo.words_of(pair[side]))
        held_out = {
            word for name in ("validation", "test") for pair in corpus[name] for word in demo.words_of(pair[side])
        }
        # Fewer pairs than by default need fewer occurrences in proportion.
        assert min(frequencies[word] for word in held_out) >= demo.MIN_OCCURRENCES * 6000 // 30_000


def test_corpus_is_the_same_everywhere():
    corpus = make_demo_corpus(num_train=1500, num_validation=60, num_test=60, seed=3)
    digest = hashlib.sha256(json.dumps(corpus).encode()).hexdigest()
    assert digest == "ad52eb951baa04c6e56ba7691c8ac3ee6cdb224148d12e10d777d1d2b8c91fa6"


@pytest.mark.parametrize(("write", "prefix"), [(demo.write_demo_corpus, ""), (demo.write_demo_summaries, "summaries_")])
def test_files_hold_the_pairs(write, prefix, tmp_path):
    make = make_demo_corpus if write is demo.write_demo_corpus else make_demo_summaries
    counts = {"num_train": 200, "num_validation": 0, "num_test": 10, "seed": 5}
    paths, corpus = write(tmp_path / "corpus", **counts), make(**counts)
    assert [path.name for path in paths.values()] == [f"{prefix}{split}.tsv" for split in corpus]
    for split, path in paths.items():
        lines = path.read_bytes().decode("utf-8").split("\n")
        assert lines.pop() == "" and [tuple(line.split("\t")) for line in lines] == corpus[split]


def test_core_keeps_subject_verb_and_objects(drawn):
    assert {text: to_english(core_of(drawn[text])) for text in CORES} == CORES
    for sentence in list(drawn.values())[:2000]:
        assert core_of(core_of(sentence)) == core_of(sentence)


def test_summaries_have_their_own_combinations(summaries, drawn):
    pairs = [pair for split in summaries.values() for pair in split]
    assert len({text for text, _ in pairs}) == len(pairs)
    for split in summaries:
        for number, (text, summary) in enumerate(summaries[split]):
            sentences = [drawn[line] for line in re.findall(r"[^.?]+[.?]", text.replace(". ", ".").replace("? ", "?"))]
            # Texts of two and of three sentences alternate.
            assert len(sentences) == 2 + number % 2 and {
                demo.split_of_sentence(sentence) for sentence in sentences
            } == {split}
            assert summary == " ".join(to_english(core_of(sentence)) for sentence in sentences)


GOLD = """\
No old man lives in the forests. | Kein alter Mann wohnt in den Wäldern.
Our big child sang on the mountain. | Unser großes Kind hat auf dem Berg gesungen.
His aunt and my children often went to the castle. | Seine Tante und meine Kinder sind oft zum Schloss gegangen.
The boy and this girl went to a sad neighbor. | Der Junge und dieses Mädchen sind zu einem traurigen Nachbarn gegangen.
The happy men show her this mouse. | Die glücklichen Männer zeigen ihr diese Maus.
Today the woman brings the doctor's child my lamps. | Heute bringt die Frau dem Kind des Arztes meine Lampen.
Now they help the brown mice. | Jetzt helfen sie den braunen Mäusen.
I hope that their aunts do not drink coffee. | Ich hoffe, dass ihre Tanten keinen Kaffee trinken.
She did not swim in the river. | Sie ist nicht im Fluss geschwommen.
The famous queens knew that I listened to her. | Die berühmten Königinnen wussten, dass ich ihr zugehört habe.
She answers the tired boy because my mother cannot sleep. | Sie antwortet dem müden Jungen, weil meine Mutter nicht schlafen kann.
Because we found her, she slept. | Weil wir sie gefunden haben, hat sie geschlafen.
When this egg is hot, the duck does not come. | Wenn dieses Ei heiß ist, kommt die Ente nicht.
You run to the park and they clean an ugly shop. | Du rennst zum Park und sie putzen einen hässlichen Laden.
She carried the umbrella, but the child was old. | Sie hat den Regenschirm getragen, aber das Kind war alt.
Where does the girl eat their sweet cookie? | Wo isst das Mädchen ihren süßen Keks?
Who buys the small green knives? | Wer kauft die kleinen grünen Messer?
Why did I answer her young sister? | Warum habe ich ihrer jungen Schwester geantwortet?
The queen who buys suitcases laughs. | Die Königin, die Koffer kauft, lacht.
The boy carried the umbrella that her aunts took. | Der Junge hat den Regenschirm getragen, den ihre Tanten genommen haben.
This small king should not arrive without him. | Dieser kleine König sollte nicht ohne ihn ankommen.
Every happy woman should carry the white chairs. | Jede glückliche Frau sollte die weißen Stühle tragen."""


def test_sentences_of_every_construction():
    gold = dict(line.split(" | ") for line in GOLD.splitlines())
    sampler, drawn = Sampler(11), {}
    for _ in range(1500):
        sentence = sampler.sentence()
        if (english := to_english(sentence)) in gold:
            drawn[english] = to_german(sentence)
    assert drawn == gold

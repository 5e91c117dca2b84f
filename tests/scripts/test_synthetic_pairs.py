import json

import datasets
import pytest
from sacrebleu import sentence_bleu, sentence_chrf
from small_runs import write_pairs
from subcommands import execute
from tiny_generator import SOURCES, TARGETS, tiny_generator

from metaphrase.data.pairs import PairSource
from metaphrase.inference import Generator, ScoredText
from metaphrase.scripts import backtranslate
from metaphrase.scripts.__main__ import run

CPU = ["--device", "cpu"]
SAMPLES = ["--temperature", "3", "--num_return_sequences", "2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "train.tsv", zip(SOURCES, TARGETS, strict=True))
    for name, lines in (("mono.de", [*TARGETS, "", "ein\tHund"]), ("train.en", SOURCES), ("train.de", TARGETS)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return tmp_path


def pairs_of(path):
    return list(PairSource(file=path).records())


def as_field(text):
    return text.translate(str.maketrans("\t\r\n", "   "))


def test_back_translation_writes_synthetic_sources_before_the_real_targets(cli_model, folder):
    words = [cli_model, *CPU, "--input", "mono.de", "--num_beams", "2"]
    execute(backtranslate, [*words, "--output", "plain.tsv"])
    execute(backtranslate, [*words, "--output", "tagged.tsv", "--tag", "<BT>"])
    execute(backtranslate, [*words, "--output", "tagged.jsonl", "--tag", "<BT>"])
    lines = [*TARGETS, "", "ein\tHund"]
    sources = tiny_generator(kind="byte").generate(lines, num_beams=2)
    targets = [as_field(line) for line in lines]
    assert pairs_of("plain.tsv") == [*zip(map(as_field, sources), targets, strict=True)]
    # A blank line has no tag: training drops such a pair.
    tagged = [f"<BT> {source}" if source.strip() else "" for source in sources]
    assert pairs_of("tagged.tsv") == [*zip(map(as_field, tagged), targets, strict=True)] and tagged[5] == ""
    assert pairs_of("tagged.jsonl") == [*zip(tagged, lines, strict=True)]


def test_back_translation_may_sample_several_sources_of_a_target(cli_model, folder):
    words = [cli_model, *CPU, "--input", "mono.de", *SAMPLES, "--output"]
    execute(backtranslate, [*words, "first.tsv"])
    execute(backtranslate, [*words, "other.tsv", "--seed", "1"])
    pairs = pairs_of("first.tsv")
    assert [target for _, target in pairs[:10]] == [target for target in TARGETS for _ in range(2)]
    assert pairs[0] != pairs[1] and pairs != pairs_of("other.tsv")


def test_distilled_targets_are_those_of_the_ensemble(cli_model, other_cli_model, folder):
    words = [cli_model, other_cli_model, *CPU, "--num_beams", "3"]
    execute("distill", [*words, "--input", "train.tsv", "--output", "best.tsv"])
    execute("distill", [*words, "--input", "train.en", "--output", "sources.tsv"])
    execute("distill", [*words, "--input", "train.tsv", "--output", "all.tsv", "--num_return_sequences", "3"])
    teachers = Generator.from_pretrained([cli_model, other_cli_model], device="cpu")
    best = [*zip(SOURCES, map(as_field, teachers.generate(SOURCES, num_beams=3)), strict=True)]
    assert pairs_of("best.tsv") == pairs_of("sources.tsv") == best
    alone = tiny_generator(kind="byte").generate(SOURCES, num_beams=3)
    assert [target for _, target in best] != [*map(as_field, alone)]
    n_best = teachers.generate_n_best(SOURCES, num_beams=3, num_return_sequences=3)
    rows = [(source, as_field(item.text)) for source, row in zip(SOURCES, n_best, strict=True) for item in row]
    assert pairs_of("all.tsv") == rows


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_the_candidate_nearest_to_the_reference_is_selected(cli_model, folder, metric):
    options = ["--num_beams", "4", "--num_return_sequences", "4", "--select", metric]
    generator = tiny_generator(kind="byte")
    n_best = generator.generate_n_best(SOURCES, num_beams=4, num_return_sequences=4)
    # A reference that is the third candidate.
    references = [as_field(row[2].text) for row in n_best]
    (folder / "train.de").write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
    words = [cli_model, *CPU, *options, "--input", "train.en", "--target", "train.de", "--output", "selected.jsonl"]
    execute("distill", words)
    selected = [target for _, target in pairs_of("selected.jsonl")]
    score = sentence_chrf if metric == "chrf" else lambda text, references: sentence_bleu(text, references)
    best = [
        max(row, key=lambda item, reference=reference: score(item.text, [reference]).score).text
        for row, reference in zip(n_best, references, strict=True)
    ]
    assert selected == best != [row[0].text for row in n_best]


def test_a_file_of_pairs_is_read_to_its_end(cli_model, folder):
    rows = [{"source": source, "target": target} for source, target in zip(SOURCES, TARGETS, strict=True)]
    (folder / "one_line.json").write_text(json.dumps(rows), encoding="utf-8")
    datasets.Dataset.from_list(rows).to_parquet(folder / "pairs.parquet")
    for name in ("one_line.json", "pairs.parquet"):
        execute("distill", [cli_model, *CPU, "--num_beams", "1", "--input", name, "--output", f"{name}.tsv"])
        assert [source for source, _ in pairs_of(f"{name}.tsv")] == SOURCES


def test_of_equally_near_candidates_the_first_is_selected():
    candidates = [ScoredText(text, None) for text in ("a dog", "the cat", "the  cat")]
    rows = iter([(candidates, ("", "the cat")), (candidates, ("", "zzz"))])
    chosen = [row[0] for row in backtranslate.choose(rows, backtranslate.nearness("chrf"), 9, with_worst=True)]
    assert chosen == [[candidates[1], candidates[0]], candidates[:1]]


def test_best_and_worst_candidates_are_preferences(cli_model, folder, caplog):
    generator = tiny_generator(kind="byte")
    n_best = generator.generate_n_best(SOURCES, num_beams=4, num_return_sequences=4)
    # The last reference is as far from all candidates.
    references = [as_field(row[2].text) for row in n_best[:-1]] + ["\N{SNOWMAN}"]
    (folder / "train.de").write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
    words = [cli_model, *CPU, "--num_beams", "4", "--num_return_sequences", "4", "--select", "chrf", "--preferences"]
    words += ["--input", "train.en", "--target", "train.de", "--output"]
    caplog.set_level("INFO")
    for name, columns in (("out.jsonl", ("prompt", "chosen", "rejected")), ("out.tsv", (0, 1, 2))):
        execute("distill", [*words, name])
        fields = dict(zip(("source_column", "target_column", "rejected_column"), columns, strict=True))
        rows = list(PairSource(file=name, **fields).records())
        assert [row[0] for row in rows] == SOURCES[:-1]
        for (_, chosen, rejected), candidates, reference in zip(rows, n_best, references, strict=False):
            scores = [sentence_chrf(item.text, [reference]).score for item in candidates]
            ends = [as_field(candidates[scores.index(end(scores))].text) for end in (max, min)]
            assert [as_field(chosen), as_field(rejected)] == ends
    message = "1 sources are left out, because all their candidates have equal scores."
    assert [record.message for record in caplog.records].count(message) == 2


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        (backtranslate, ["--input", "mono.de", "--output", "out.txt"], "`output` must end in .tsv or .jsonl, got"),
        (backtranslate, ["--output", "out.tsv", "--shard", "1/2"], "`input` must be a file with `shard`, got a pipe"),
        (backtranslate, ["--input", "mono.de", "--resume"], "`output` must be given with `resume`"),
        ("distill", ["--input", "train.en", "--select", "chrf"], "`select` must come with pairs .* got sources alone"),
        ("distill", ["--input", "train.tsv", "--select", "chrf"], "`num_return_sequences` above 1, got 1"),
        ("distill", ["--input", "train.en", "--source_column", "1"], "`source_column` must come with one file of"),
        ("distill", ["--input", "train.tsv", "--preferences"], "`select` must be given with `preferences`"),
        ("distill", ["--select", "chrf", "--preferences", "--resume"], "`resume` must not be given with `preferences`"),
        ("distill", ["--target", "train.de"], "`input` must be given with `target`"),
        ("distill", ["--input", "broken.tsv"], "got 1 in line 2. `metaphrase filter` drops such lines"),
        ("distill", ["--input", "train.tsv", "--output", "train.tsv", "--overwrite"], "another file than `input`"),
    ],
)
def test_wrong_words_are_refused(cli_model, folder, capsys, verb, words, message):
    (folder / "broken.tsv").write_text("a\tb\nc\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        execute(verb, [cli_model, *CPU, *words])


def test_pairs_go_to_standard_output_with_tabs(cli_model, folder, capsys):
    assert run("distill", [cli_model, *CPU, "--input", "train.tsv"]) == 0
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert [line.split("\t")[0] for line in lines] == SOURCES
    assert run("distill", [cli_model, *CPU, "--input", "train.tsv", "--output", "a.jsonl"]) == 0
    assert [json.loads(line)["source"] for line in (folder / "a.jsonl").read_text().splitlines()] == SOURCES

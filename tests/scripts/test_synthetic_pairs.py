import json
import signal

import pytest
from sacrebleu import sentence_bleu, sentence_chrf
from small_runs import write_pairs
from subcommands import execute
from tiny_generator import SOURCES, TARGETS, tiny_generator

from metaphrase.data.pairs import PairSource
from metaphrase.inference import Generator
from metaphrase.scripts import backtranslate, distill, filter, generate
from metaphrase.scripts.__main__ import run
from metaphrase.scripts.parsers import parse
from metaphrase.tokenization.texts import shard_range

CPU = ["--device", "cpu"]
SAMPLES = ["--temperature", "3", "--num_return_sequences", "2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mono.de").write_text("".join(f"{line}\n" for line in [*TARGETS, "", "ein\tHund"]), encoding="utf-8")
    write_pairs(tmp_path / "train.tsv", zip(SOURCES, TARGETS, strict=True))
    (tmp_path / "train.en").write_text("".join(f"{line}\n" for line in SOURCES), encoding="utf-8")
    (tmp_path / "train.de").write_text("".join(f"{line}\n" for line in TARGETS), encoding="utf-8")
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
    execute(distill, [*words, "--input", "train.tsv", "--output", "best.tsv"])
    execute(distill, [*words, "--input", "train.en", "--output", "sources.tsv"])
    execute(distill, [*words, "--input", "train.tsv", "--output", "all.tsv", "--num_return_sequences", "3"])
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
    references = [as_field(row[2].text) for row in n_best]
    (folder / "train.de").write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
    words = [cli_model, *CPU, *options, "--input", "train.en", "--target", "train.de", "--output", "selected.jsonl"]
    execute(distill, words)
    selected = [target for _, target in pairs_of("selected.jsonl")]
    score = sentence_chrf if metric == "chrf" else lambda text, references: sentence_bleu(text, references)
    for row, reference, text in zip(n_best, references, selected, strict=True):
        assert text == max((item.text for item in row), key=lambda text: score(text, [reference]).score)
    assert selected != [row[0].text for row in n_best]


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (backtranslate, ["--input", "mono.de", "--tag", "<BT>", *SAMPLES]),
        (distill, ["--input", "train.tsv", "--select", "chrf", "--num_beams", "2", "--num_return_sequences", "2"]),
    ],
    ids=["backtranslate", "distill"],
)
def test_runs_that_were_killed_end_as_one_that_was_not(cli_model, folder, server, verb, words):
    words = [cli_model, *CPU, "--chunk_size", "2", *[str(folder / word) if "." in word else word for word in words]]
    execute(verb, [*words, "--output", "whole.tsv"])
    whole, output = (folder / "whole.tsv").read_bytes(), folder / "out.tsv"
    resumed = [*words, "--output", str(output), "--resume"]
    for most_bytes in (len(whole) // 3, 2 * len(whole) // 3):
        name = verb.__name__.rpartition(".")[2]
        assert server.run(resumed, output, subcommand=name, most_bytes=most_bytes) == -signal.SIGXFSZ
        assert output.read_bytes() == whole[:most_bytes]
    execute(verb, resumed)
    assert output.read_bytes() == whole
    if verb is backtranslate:
        with pytest.raises(ValueError, match="`output` must hold the lines of this command to be resumed"):
            execute(verb, [*resumed, "--tag", "<NEW>"])


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        (backtranslate, ["--input", "mono.de", "--output", "out.txt"], "`output` must end in .tsv or .jsonl, got"),
        (backtranslate, ["--output", "out.tsv", "--shard", "1/2"], "`input` must be a file with `shard`, got a pipe"),
        (backtranslate, ["--input", "mono.de", "--resume"], "`output` must be given with `resume`"),
        (distill, ["--input", "train.en", "--select", "chrf"], "`select` must come with pairs .* got sources alone"),
        (distill, ["--input", "train.tsv", "--select", "chrf"], "`num_return_sequences` above 1, got 1"),
        (distill, ["--input", "train.en", "--source_column", "1"], "`source_column` must come with one file of pairs"),
        (distill, ["--target", "train.de"], "`input` must be given with `target`"),
        (distill, ["--input", "broken.tsv"], "got 1 in line 2. `metaphrase filter` drops such lines"),
        (distill, ["--input", "train.tsv", "--output", "train.tsv", "--overwrite"], "another file than `input`"),
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


NUM_LINES, CHUNK_SIZE = 23, 3
SEARCHES = {
    "greedy": (generate, []),
    "n_best": (generate, ["--num_beams", "2", "--num_return_sequences", "2"]),
    "sampling": (backtranslate, ["--temperature", "3", "--seed", "5"]),
    "pairs": (distill, ["--num_beams", "2", "--num_return_sequences", "2", "--select", "chrf"]),
}


@pytest.fixture
def words(cli_model, tmp_path):
    rows = [(f"{SOURCES[n % 5]} {SOURCES[n % 3]}", TARGETS[n % 5]) for n in range(NUM_LINES)]
    (tmp_path / "in.txt").write_text("".join(f"{source}\n" for source, _ in rows), encoding="utf-8")
    # A header, so that pairs and lines differ in number.
    write_pairs(tmp_path / "in.tsv", [("source", "target"), *rows])
    return lambda subcommand: [
        *(cli_model, "--device", "cpu", "--chunk_size", str(CHUNK_SIZE)),
        *("--input", str(tmp_path / ("in.tsv" if subcommand is distill else "in.txt"))),
    ]


@pytest.mark.parametrize("search", SEARCHES)
def test_shards_together_are_the_whole_output(words, tmp_path, search):
    subcommand, search_words = SEARCHES[search]
    command = [*words(subcommand), *search_words]

    def run(name, *more):
        execute(subcommand, [*command, "--output", str(tmp_path / name), *more])
        return (tmp_path / name).read_bytes()

    whole = run("whole.tsv")
    parts = [run(f"{number}.tsv", "--shard", f"{number}/3") for number in (1, 2, 3)]
    assert b"".join(parts) == whole and all(parts)
    (tmp_path / "2.tsv").write_bytes(parts[1][: len(parts[1]) // 2])
    assert run("2.tsv", "--shard", "2/3", "--resume") == parts[1]


def test_parts_are_nearly_equal_and_begin_at_chunks():
    parts = [shard_range(100, (number, 4), 7) for number in (1, 2, 3, 4)]
    assert parts == [range(21), range(21, 49), range(49, 77), range(77, 100)]
    assert shard_range(10, None, 7) == range(10) and shard_range(5, (1, 1)) == range(5)
    assert not shard_range(0, None) and not shard_range(0, (2, 3))
    with pytest.raises(ValueError, match=r"no more parts than the input has chunks of 7, 15, got 16\. Set a smaller"):
        shard_range(100, (1, 16), 7)
    with pytest.raises(ValueError, match="`shard` must have no more parts than the input has lines or pairs, 3, got 4"):
        shard_range(3, (4, 4))


@pytest.mark.parametrize("word", ["0/64", "65/64", "3", "auto"])
def test_a_part_is_one_of_the_parts(word):
    assert parse("generate", ["some/model", "--shard", "3/64"]).shard == (3, 64)
    with pytest.raises(ValueError, match="`shard` must be K/N with K from 1 to N, got"):
        parse("generate", ["some/model", "--shard", word])


def test_filtered_shards_together_are_the_whole_output_but_for_duplicates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [(f"The house of {name} is big.", f"La casa de {name} es grande.") for name in "abcdefghijkl"]
    rows += [("A dog.", "A dog."), ("", "Nada."), *rows[:5]]
    write_pairs(tmp_path / "pairs.tsv", rows)

    def run(output, skipped, *more):
        execute(filter, ["pairs.tsv", "--output", output, *more, "--skip_rules", "encoding", *skipped])
        return (tmp_path / output).read_bytes()

    def join(name, skipped):
        return b"".join(run(f"{name}_{part}.tsv", skipped, "--shard", f"{part}/4") for part in (1, 2, 3, 4))

    repeated = ["duplicate", "targets_per_source"]
    assert join("alone", repeated) == run("alone.tsv", repeated)
    whole, joined = run("whole.tsv", []), join("each", [])
    assert len(joined.splitlines()) == len(whole.splitlines()) + 5 and joined.startswith(whole)
    (tmp_path / "joined.tsv").write_bytes(joined)
    execute(filter, ["joined.tsv", "--output", "last.tsv", "--rules", *repeated])
    assert (tmp_path / "last.tsv").read_bytes() == whole
    with pytest.raises(ValueError, match="has lines or pairs, 19, got 20"):
        run("many.tsv", [], "--shard", "20/20")

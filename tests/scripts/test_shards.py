import pytest
from small_runs import write_pairs
from subcommands import execute
from tiny_generator import SOURCES, TARGETS

from metaphrase.scripts import backtranslate, filter, generate
from metaphrase.scripts.parsers import parse
from metaphrase.tokenization.texts import shard_range

NUM_LINES, CHUNK_SIZE = 23, 3
SEARCHES = {
    "greedy": (generate, []),
    "n_best": (generate, ["--num_beams", "2", "--num_return_sequences", "2"]),
    "sampling": (backtranslate, ["--temperature", "3", "--seed", "5"]),
    "pairs": ("distill", ["--num_beams", "2", "--num_return_sequences", "2", "--select", "chrf"]),
}


@pytest.fixture
def words(cli_model, tmp_path):
    rows = [(f"{SOURCES[n % 5]} {SOURCES[n % 3]}", TARGETS[n % 5]) for n in range(NUM_LINES)]
    (tmp_path / "in.txt").write_text("".join(f"{source}\n" for source, _ in rows), encoding="utf-8")
    # A header, so that pairs and lines differ in number.
    write_pairs(tmp_path / "in.tsv", [("source", "target"), *rows])
    return lambda subcommand: [
        *(cli_model, "--device", "cpu", "--chunk_size", str(CHUNK_SIZE)),
        *("--input", str(tmp_path / ("in.tsv" if subcommand == "distill" else "in.txt"))),
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
    assert [shard_range(3, (number, 4)) for number in (1, 2, 3, 4)] == [range(0), range(1), range(1, 2), range(2, 3)]


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
    # More parts than pairs leave one without any.
    assert run("many.tsv", [], "--shard", "1/20") == b""

"""Output files: as they come, and after a run that was killed as if it had not been."""

import os
import signal

import pytest
from subcommands import execute
from tiny_generator import SOURCES

from metaphrase.inference import ScoredText
from metaphrase.inference.line_files import OutputFile, format_targets
from metaphrase.scripts import generate

NUM_LINES = 23
LINES = [f"{SOURCES[index % 5]} {SOURCES[index % 3]}" if index % 7 != 3 else "" for index in range(NUM_LINES)]
SEARCHES = {
    "sampling": ["--temperature", "3", "--num_return_sequences", "2", "--seed", "5"],
    "risk": ["--mbr_candidates", "3", "--n_best"],
}


@pytest.fixture
def words(cli_model, tmp_path):
    write_lines(tmp_path / "in", LINES)
    return [cli_model, "--device", "cpu", "--input", str(tmp_path / "in"), "--window", "5", "--batch_size", "2"]


def write_lines(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def whole_output(words, path):
    execute(generate, [*words, "--output", str(path), "--overwrite"])
    return path.read_bytes()


@pytest.mark.parametrize("search", ["sampling", pytest.param("risk", marks=pytest.mark.slow)])
def test_runs_that_were_killed_end_as_one_that_was_not(words, search, tmp_path, server):
    words = [*words, *SEARCHES[search]]
    whole, output = whole_output(words, tmp_path / "whole"), tmp_path / "out"
    resumed = [*words, "--output", str(output), "--resume"]
    size = len(whole)
    # In the middle of lines and of groups, at their ends, and where nothing has been written; and from outside.
    line_ends = [place for place, byte in enumerate(whole, start=1) if byte == ord("\n")]
    for most_bytes in (0, line_ends[6] - 1, size // 2 + 1, size - 1):
        assert server.run(resumed, output, most_bytes=most_bytes) == -signal.SIGXFSZ
        assert output.read_bytes() == whole[:most_bytes]
    assert server.run(resumed, output) == 0
    assert output.read_bytes() == whole
    output.unlink()
    statuses = [server.run(resumed, output, seen_bytes=size * part // 3) for part in (1, 2)]
    # Where the machine is busy, a run may be through before it is killed.
    assert set(statuses) <= {-signal.SIGKILL, 0}
    assert server.run(resumed, output) == 0
    assert output.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]


def test_a_whole_output_stays_as_it_is_and_an_output_with_overwrite_begins_anew(words, tmp_path, caplog):
    output = tmp_path / "out"
    whole = whole_output(words, output)
    before = output.stat().st_mtime_ns
    caplog.set_level("INFO")
    execute(generate, [*words, "--output", str(output), "--resume"])
    assert output.read_bytes() == whole and output.stat().st_mtime_ns == before
    assert "at line 21" in caplog.text and "3 lines in" in caplog.text
    # An owner who changes a line that has its target already learns that the target stays.
    assert "changed after" not in caplog.text
    os.utime(tmp_path / "in", ns=(before, before + 10**9))
    execute(generate, [*words, "--output", str(output), "--resume"])
    assert output.read_bytes() == whole
    assert f"{tmp_path / 'in'} changed after the last line of {output} was written" in caplog.text
    output.write_bytes(whole[: len(whole) // 2])
    assert whole_output(words, output) == whole


OTHER = r"source \d+ has '.*' instead of '.*'"


@pytest.mark.parametrize(
    ("before", "after", "lines", "message"),
    [
        ("", "--num_beams 4 --length_penalty -5", LINES, OTHER),
        ("", "", ["the dog"] * NUM_LINES, OTHER),
        ("", "", LINES[:20], "must not hold more sources than the input, got 23 in"),
        ("--num_beams 3 --num_return_sequences 3", "", LINES, "instead of|more sources than"),
    ],
)
def test_an_output_of_another_command_is_refused_and_stays(words, tmp_path, before, after, lines, message):
    output = tmp_path / "out"
    content = whole_output([*words, *before.split()], output)
    write_lines(tmp_path / "in", lines)
    with pytest.raises(ValueError, match=message):
        execute(generate, [*words, *after.split(), "--output", str(output), "--resume"])
    assert output.read_bytes() == content


@pytest.mark.parametrize("search", [[], ["--num_beams", "3", "--n_best"]])
def test_a_file_without_a_line_feed_is_not_taken_for_an_unfinished_line(words, tmp_path, search):
    for notes in (b"\xff\xfe", b"0 ||| mine"):
        (tmp_path / "notes").write_bytes(notes)
        with pytest.raises(ValueError, match=OTHER.replace(r"\d+", "0")):
            execute(generate, [*words, *search, "--output", str(tmp_path / "notes"), "--resume"])
        assert (tmp_path / "notes").read_bytes() == notes


def test_lines_may_differ_in_the_last_digits_of_a_score_alone(tmp_path):
    path, target = tmp_path / "out", ScoredText("ä", -1.234567)
    lines = format_targets(0, [target, target], True)
    for begun, fits in (
        (format_targets(0, [target, ScoredText("ä", -1.234571)], True), True),
        (format_targets(0, [target, ScoredText("ä ||| -1.234567", -1.234567)], True), False),
        (format_targets(0, [ScoredText("ä", -1.234571)], True) + "0 ||| ä ||| -1.2345", True),
        ("0 ||| ä ||| -1.2346", True),
        (format_targets(0, [ScoredText("ä", -1.24)], True) + "0 |||", False),
        ("0 ||| ö ||| -1.23", False),
    ):
        path.write_text(begun, encoding="utf-8")
        with OutputFile(path, resume=True, num_targets=2, with_scores=True, chunk_size=4) as output:
            if fits:
                output.write(lines)
            else:
                with pytest.raises(ValueError, match="source 0 has"):
                    output.write(lines)
        assert path.read_text(encoding="utf-8") == (lines if fits and begun.count("\n") < 2 else begun)


def test_resuming_needs_a_file(words, tmp_path):
    with pytest.raises(ValueError, match="`output` must be given with `resume`, got None and True"):
        execute(generate, [*words, "--resume"])
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="`output` must be a regular file with `resume`"):
            execute(generate, [*words, "--output", str(path), "--resume"])


@pytest.mark.parametrize(("num_targets", "chunk_size"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_how_far_a_file_goes_is_read_from_it_at_every_byte(tmp_path, num_targets, chunk_size):
    assert format_targets(3, [ScoredText("a\r\nb", None)], False) == "a  b\n"
    texts = [["", "ä ||| b"][:num_targets], ["c\u2028d", "\x85"][:num_targets]] * 3
    layout = {"num_targets": num_targets, "with_scores": num_targets > 1, "chunk_size": chunk_size}
    rows = [[ScoredText(text, -0.5) for text in group] for group in texts]
    groups = [format_targets(index, row, num_targets > 1).encode() for index, row in enumerate(rows)]
    whole, path = b"".join(groups), tmp_path / "out"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        done = sum(len(b"".join(groups[: number + 1])) <= size for number in range(len(groups)))
        with OutputFile(path, resume=True, **layout) as output:
            assert output.num_done == done
            assert output.next_source == (max(done - 1, 0) // chunk_size) * chunk_size
            for group in groups[output.next_source :]:
                output.write(group.decode())
            output.finish()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("lines", [["a\n", "b\n"], []])
def test_what_is_there_stays_until_something_stands_in_its_place(tmp_path, lines):
    path = tmp_path / "out"
    path.write_text("of an older run\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no such option"), OutputFile(path):
        raise ValueError("no such option")
    assert path.read_text(encoding="utf-8") == "of an older run\n"
    with OutputFile(path) as output:
        for count, line in enumerate(lines, start=1):
            output.write(line)
            assert path.read_text(encoding="utf-8") == "".join(lines[:count])
        output.finish()
    assert path.read_text(encoding="utf-8") == "".join(lines)


def test_a_new_file_may_be_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with OutputFile(path) as output:
        output.write("a\n")
        assert os.read(reader, 100) == b"a\n"
        output.finish()
    os.close(reader)


def test_an_output_is_no_input(words, tmp_path):
    terms, link = tmp_path / "terms", tmp_path / "link"
    terms.write_text("cat\tKatze\n", encoding="utf-8")
    for path, message in ((tmp_path / "in", "input"), (terms, "glossary")):
        link.unlink(missing_ok=True)
        os.link(path, link)
        before = path.read_bytes()
        with pytest.raises(ValueError, match=f"`output` must be .*{message}"):
            execute(generate, [*words, "--glossary", str(terms), "--output", str(link), "--overwrite"])
        assert path.read_bytes() == before

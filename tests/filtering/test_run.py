import gzip
import itertools
import json

import pytest

from metaphrase.data.pairs import PairSource
from metaphrase.filtering import run
from metaphrase.filtering.rules import RULES, FilterSettings
from metaphrase.filtering.run import WorkFolder, filter_pairs, format_report, partial_path
from metaphrase.storage.folders import write_lock

ACTIVE = [rule for rule in RULES if rule not in ("encoding", "language")]
SETTINGS = FilterSettings(rules=ACTIVE)
ROWS = [
    ("A dog sleeps.", "Un perro duerme."),
    ("A cat sleeps.", "Un gato duerme."),
    ("a dog sleeps", "un perro duerme"),
    ("A bird sings.", "A bird sings."),
    ("A dog sleeps.", "Duerme un perro."),
    ("A fish swims.", "Un pez"),
    ("A dog sleeps.", "El perro está dormido."),
    ("", "Nada."),
    ("A cat runs.", "Un gato corre."),
]


def write(path, rows):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    return PairSource(file=path)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "pairs.tsv", ROWS)


def test_outputs_hold_every_pair_once_and_the_report_adds_up(source, tmp_path):
    clean, rejected, report = tmp_path / "clean.tsv", tmp_path / "rejected.tsv", tmp_path / "report.json"
    settings = FilterSettings(rules=ACTIVE, max_targets_per_source=2)
    result = filter_pairs(source, [clean], settings, rejected=rejected, report=report)
    kept = [tuple(line.split("\t")) for line in clean.read_text(encoding="utf-8").splitlines()]
    assert kept == [ROWS[number] for number in (0, 1, 4, 8)]
    dropped = [line.split("\t") for line in rejected.read_text(encoding="utf-8").splitlines()]
    assert [rule for rule, *_ in dropped] == ["duplicate", "copy", "end_punctuation", "targets_per_source", "empty"]
    assert sorted([*kept, *(tuple(pair) for _, *pair in dropped)]) == sorted(ROWS)
    content = json.loads(report.read_text(encoding="utf-8"))
    assert (content["read"], content["kept"], result["read"]) == (9, 4, 9)
    assert content["dropped"] == {rule: 1 for rule, *_ in dropped}
    assert content["examples"]["copy"] == [{"source": "A bird sings.", "target": "A bird sings."}]
    assert "copy" in format_report(result) and "11.11%" in format_report(result)


def test_pairs_that_cannot_be_read_are_dropped_and_counted(tmp_path):
    (tmp_path / "pairs.tsv").write_bytes(b"A dog.\tUn perro.\nno tab\nA \xff.\tUn gato.\n" + b"x" * 99 + b"\ty\n")
    source = PairSource(file=tmp_path / "pairs.tsv", max_line_characters=50)
    dropped = filter_pairs(source, [tmp_path / "clean.tsv"], SETTINGS)["dropped"]
    assert dropped == {"malformed": 1, "invalid_utf8": 1, "line_too_long": 1}
    # Only equal texts are exact duplicates. Tabs and line breaks inside a text become spaces.
    rows = [*ROWS[:3], ROWS[1], ("A\tdog\nsleeps.", "Un perro\r\nduerme.")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in rows), encoding="utf-8")
    settings = FilterSettings(rules=["duplicate"], duplicates="exact")
    assert filter_pairs(PairSource(file=path), [tmp_path / "exact.tsv"], settings)["dropped"] == {"duplicate": 1}
    lines = (tmp_path / "exact.tsv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4 and lines[-1] == "A dog sleeps.\tUn perro  duerme."


def test_weights_stay_with_their_pairs(tmp_path):
    (tmp_path / "pairs.tsv").write_text("A dog.\tUn perro.\t0.5\nA cat.\tA cat.\t1\nA cat.\tUn gato.\t2\n")
    source = PairSource(file=tmp_path / "pairs.tsv", source_column=0, target_column=1, weight_column=2)
    for name in ("clean.tsv", "clean.jsonl"):
        filter_pairs(source, [tmp_path / name], FilterSettings(rules=["copy"]))
    assert (tmp_path / "clean.tsv").read_text("utf-8") == "A dog.\tUn perro.\t0.5\nA cat.\tUn gato.\t2.0\n"
    again = PairSource(file=tmp_path / "clean.jsonl", weight_column="weight")
    assert [*again.pairs()] == [("A dog.", "Un perro.", 0.5), ("A cat.", "Un gato.", 2.0)]


@pytest.mark.parametrize("suffix", [".tsv", ".jsonl.gz", ".txt"])
def test_every_format_is_read_again_as_the_same_pairs(source, tmp_path, suffix):
    outputs = [tmp_path / f"clean{suffix}"] if suffix != ".txt" else [tmp_path / "clean.en", tmp_path / "clean.es.gz"]
    filter_pairs(source, outputs, SETTINGS)
    files = {"file": outputs[0]} if len(outputs) == 1 else {"source_file": outputs[0], "target_file": outputs[1]}
    assert list(PairSource(**files).records()) == [ROWS[number] for number in (0, 1, 4, 6, 8)]


def make_corpus():
    """Return pairs with noise of which some needs the memory of earlier chunks."""
    # Near duplicates differ in digits alone: names of letters are needed.
    names = ["".join(letters) for letters in itertools.product("aeiou", "klmnprst", "aeiou", "dg")][:300]
    rows = [(f"The house of {name} is big.", f"La casa de {name} es grande.") for name in names]
    words = [("dog", "perro"), ("cat", "gato"), ("fish", "pez")]
    rows += [(f"One {s} sees another {t}.", f"Otro {a} ve {b}.") for s, a in words for t, b in words] * 9
    return rows + [("Same source.", f"Destino {'x' * number}.") for number in range(60)] + rows[:50]


class Killed(BaseException):
    pass


def test_a_run_killed_after_any_write_ends_with_the_same_bytes(tmp_path, monkeypatch):
    name = "clean.jsonl.gz"
    monkeypatch.setattr(run, "PAIRS_PER_CHUNK", 64)
    source = write(tmp_path / "pairs.tsv", make_corpus())
    names = {"rejected": "rejected.tsv", "report": "report.json"}

    def start(folder, resume):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        filter_pairs(source, [name], SETTINGS, resume=resume, **names)

    start(tmp_path / "whole", False)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert set(whole) == {name, *names.values()} and gzip.compress(b"") != whole[name] != b""

    def kill_at(method, number):
        original, calls = getattr(WorkFolder, method), iter(range(1000))

        def count(*arguments):
            if next(calls) == number:
                if method == "append":
                    original(arguments[0], arguments[1], arguments[2][: len(arguments[2]) // 2])
                raise Killed
            return original(*arguments)

        return method, count

    for method, number in (("append", 0), ("append", 12), ("append", 22), ("save", 0), ("save", 3), ("finish", 0)):
        folder = tmp_path / f"{method}_{number}"
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(WorkFolder, *kill_at(method, number))
            start(folder, False)
        assert not (folder / name).exists() and partial_path(folder / name).exists()
        start(folder, True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_chunks_and_the_alignment_rule_do_not_depend_on_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MIN_PAIRS", 50)
    source, outputs = write(tmp_path / "pairs.tsv", make_corpus()), []
    for size in (50, 10_000):
        monkeypatch.setattr(run, "PAIRS_PER_CHUNK", size)
        output, report = tmp_path / f"clean_{size}.tsv", tmp_path / f"report_{size}.json"
        filter_pairs(source, [output], SETTINGS, report=report)
        assert "misaligned_share" in json.loads(report.read_text(encoding="utf-8"))["alignment"]
        outputs.append(output.read_bytes())
    assert outputs[0] == outputs[1] != b""


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="must hold at least one pair, got none"):
        filter_pairs(write(tmp_path / "pairs.tsv", []), [tmp_path / "clean.tsv"], SETTINGS)
    assert not partial_path(tmp_path / "clean.tsv").exists()


def open_folder(path, resume, **key):
    folder = WorkFolder({"text": path}, key, resume=resume)
    folder.path.mkdir(exist_ok=True)
    return folder


def test_another_command_and_a_second_run_are_refused(source, tmp_path):
    path = tmp_path / "out.tsv"
    open_folder(path, False, rules=["copy"]).save({"read": 1})
    for resume in (True, False):
        with (
            write_lock(partial_path(tmp_path / "clean.tsv"), "output"),
            pytest.raises(ValueError, match="by one run at a"),
        ):
            filter_pairs(source, [tmp_path / "clean.tsv"], SETTINGS, resume=resume)
    with pytest.raises(ValueError, match=r"`rules` must be \['copy'\] as in the stopped run in .*, got \['empty'\]"):
        open_folder(path, True, rules=["empty"])
    assert open_folder(path, False, rules=["empty"]).state == {}


def test_a_folder_that_no_run_has_written_is_left_alone(tmp_path):
    own = partial_path(tmp_path / "out.tsv") / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine")
    for resume in (True, False):
        with pytest.raises(ValueError, match="that no run has written"):
            open_folder(tmp_path / "out.tsv", resume)
    assert own.read_text() == "mine"


def test_files_that_lost_their_ends_are_not_resumed(tmp_path):
    folder = open_folder(tmp_path / "out.tsv", False)
    folder.append("text", b"one\n")
    folder.save({"read": 1})
    (folder.path / "text").write_bytes(b"on")
    stopped = open_folder(tmp_path / "out.tsv", True)
    with pytest.raises(ValueError, match=r"text must have at least 4 bytes. --overwrite"):
        stopped.cut_files()
    folder = open_folder(tmp_path / "out.tsv", False)
    folder.cut_files()
    assert folder.state == {} and (folder.path / "text").read_bytes() == b""

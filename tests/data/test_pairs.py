import csv
import gzip
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.data import pairs as pairs_of_files
from metaphrase.data.pairs import READERS, DataReport, PairSource, load_pairs, read_cached, read_parallel, split_pairs

JSON_ROWS = b'{"source": "a", "target": "b"},{"source": %s, "target": "d"},{"source": "e", "target": "f"}'
JSON_LINES = JSON_ROWS.replace(b"},", b"}\n")
NAMED = {"source_column": "en", "target_column": "de"}
PAIRS = [("One house.", "Ein Haus."), ('A "quoted" word', 'Ein "Wort", so'), ("Grüße", "日本語")]


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def load_cached(**options):
        names = ("file", "source_file", "target_file")
        paths = {name: tmp_path / options[name] for name in names if name in options}
        return load_pairs(**{**options, **paths})

    return load_cached


def as_tuples(dataset: datasets.Dataset) -> list[tuple[str, str]]:
    assert dataset.column_names == ["source", "target"]
    return list(zip(dataset["source"], dataset["target"], strict=True))


def write(folder: Path, name: str, content: str | bytes) -> str:
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return name


def rows_as_json(pairs, source="source", target="target", key=None):
    rows = [{source: first, target: second} for first, second in pairs]
    return [{key: row} for row in rows] if key else rows


@pytest.mark.parametrize(("ending", "last"), [("\n", True), ("\r\n", False)])
def test_parallel_text_lines_end_only_at_line_feeds(tmp_path, load, ending, last):
    sources = ["a\u2028b", "c\x85d\x0be", "", "f\x1cg\rh"]
    targets = ["1", "2", "3", "4\x0c"]
    for name, lines in (("s.en", sources), ("t.de", targets)):
        write(tmp_path, name, "\ufeff" + ending.join(lines) + (ending if last else ""))
    assert as_tuples(load(source_file="s.en", target_file="t.de")) == list(zip(sources, targets, strict=True))
    write(tmp_path, "t.de", "1\n2")
    with pytest.raises(ValueError, match=r"4 in .*s\.en and 2 in .*t\.de"):
        load(source_file="s.en", target_file="t.de")


def as_csv(text):
    return f'"{text.replace(chr(34), chr(34) * 2)}"'


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.tsv", "\ufeff" + "".join(f"{s}\t{t}\n" for s, t in PAIRS), {}),
        ("a.tsv.gz", "\r\n".join(f"{s}\t{t}" for s, t in PAIRS), {}),
        ("names.tsv", "de\tid\ten\n" + "".join(f"{t}\t7\t{s}\n" for s, t in PAIRS), NAMED),
        ("numbers.tsv", "".join(f"x\t{t}\t{s}\n" for s, t in PAIRS), {"source_column": 2, "target_column": 1}),
        ("a.csv", "\ufefftarget,source\r\n" + "".join(f"{as_csv(t)},{as_csv(s)}\r\n" for s, t in PAIRS), {}),
        ("a.json.gz", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows_as_json(PAIRS)), {}),
        ("array.json", "\ufeff" + json.dumps(rows_as_json(PAIRS), indent=2), {}),
        ("nested.jsonl", "\n".join(map(json.dumps, rows_as_json(PAIRS, "en", "de", "translation"))), NAMED),
    ],
)
def test_formats_of_one_file(tmp_path, load, name, content, columns):
    write(tmp_path, name, content)
    assert as_tuples(load(file=name, **columns)) == PAIRS


ROWS = [("a", "b", "0.5"), ("c", "d", "1e3"), ("e", "f", "{}")]
WEIGHTED = {
    "a.tsv": "\n".join(map("\t".join, [("source", "target", "w"), *ROWS])),
    "numbers.tsv": "\n".join(map("\t".join, ROWS)),
    "a.csv": "\n".join(map(",".join, [("w", "target", "source"), *(row[::-1] for row in ROWS)])),
    "a.jsonl": '{{"source": "a", "target": "b", "w": 0.5}}\n{{"source": "c", "target": "d", "w": 1000}}\n'
    '{{"source": "e", "target": "f", "w": "{}"}}',
}


@pytest.mark.parametrize("weight", ["0", "-0.5", "nan", "inf", "much"])
@pytest.mark.parametrize("name", [*WEIGHTED, "a.parquet", "nested.parquet"])
def test_weights_are_read_or_refused_with_their_line(tmp_path, load, name, weight):
    if name in WEIGHTED:
        write(tmp_path, name, WEIGHTED[name].format(weight))
    else:
        pairs = rows_as_json([row[:2] for row in ROWS], key="translation" if name == "nested.parquet" else None)
        rows = [pair | {"w": row[2].format(weight)} for pair, row in zip(pairs, ROWS, strict=True)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    columns, report = {"weight_column": 2 if name == "numbers.tsv" else "w"}, DataReport()
    expected = [("a", "b", 0.5), ("c", "d", 1000.0), ("e", "f", 0.0)][: 3 if weight == "0" else 2]
    if weight != "0":
        with pytest.raises(ValueError, match=rf"{name}, .* [234] .* finite number of at least 0 .*'{weight}'\."):
            load(file=name, **columns)
    pairs = load(file=name, **columns, malformed="skip", report=report)
    assert [*zip(*(pairs[side] for side in ("source", "target", "weight")), strict=True)] == expected
    source = PairSource(file=tmp_path / name, **columns, malformed="skip")
    assert list(source.pairs()) == expected and source.sample(9)[0]["weight"][:] == pairs["weight"][:]
    assert report.malformed == 3 - len(expected)


def test_features_of_other_columns_have_one_order(tmp_path, load):
    write(tmp_path, "a.tsv", "run\tran\tV;PST\nrun\truns\tV;SG;3;PRS\ngo\tgo\tN\n")
    expected = [("run;PST;V", "ran"), ("run;3;PRS;SG;V", "runs"), ("go;N", "go")]
    assert as_tuples(load(file="a.tsv", source_column=[0, 2], target_column=1)) == expected
    analyses = [(form, text) for text, form in expected]
    assert as_tuples(load(file="a.tsv", source_column=1, target_column=[0, 2])) == analyses
    with pytest.raises(ValueError, match="must name columns in the first line"):
        load(file="a.tsv", source_column=[0, 3], target_column=1)
    with pytest.raises(ValueError, match="must name columns in the first line"):
        load(file="a.tsv", source_column=[], target_column=1)
    assert as_tuples(load(file="a.tsv", source_column=[0], target_column=1))[0] == ("run", "ran")
    write(tmp_path, "a.jsonl", '{"source": "a", "target": "b"}')
    with pytest.raises(ValueError, match=r"must hold a text \(0, 2\)"):
        load(file="a.jsonl", source_column=[0, 2], target_column=1)


@pytest.mark.parametrize("key", [None, "translation"])
def test_parquet(tmp_path, load, key):
    pq.write_table(pa.Table.from_pylist(rows_as_json(PAIRS, "en", "de", key)), tmp_path / "a.parquet", row_group_size=2)
    assert as_tuples(load(file="a.parquet", source_column="en", target_column="de")) == PAIRS
    with pytest.raises(ValueError, match=r"'fr'.*\['en', 'de'\]"):
        load(file="a.parquet", source_column="fr", target_column="de")


def test_parquet_with_nulls_and_a_file_that_was_cut(tmp_path, load):
    pq.write_table(pa.table({"source": ["a", None], "target": ["1", "2"]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match="row 1 must hold a text 'source'"):
        load(file="null.parquet")
    column = ["a"] * 2**16 + [None]
    pq.write_table(pa.table({"source": column, "target": column}), tmp_path / "long.parquet")
    *_, last = READERS[".parquet"](str(tmp_path / "long.parquet"), (None, None))
    assert "row 65536 must hold a text 'source'" in last.message
    (tmp_path / "null.parquet").write_bytes((tmp_path / "null.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"null\.parquet must be a whole Parquet file, got: "):
        load(file="null.parquet", malformed="skip", invalid_utf8="skip")


@pytest.mark.parametrize("key", [None, "translation"])
def test_folder_that_datasets_understands(tmp_path, load, key):
    folder = tmp_path / "folder"
    folder.mkdir()
    rows = rows_as_json([*PAIRS, ("lost", None)], "en", "de", key)
    write(folder, "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    options = {"dataset_name": str(folder), "source_column": "en", "target_column": "de"}
    with pytest.raises(ValueError, match=r"row 3 must hold a text 'de'"):
        load(**options)
    report = DataReport()
    assert as_tuples(load(**options, malformed="skip", report=report)) == PAIRS
    assert (report.read, report.malformed, report.kept) == (4, 1, 3)
    with pytest.raises(ValueError, match="'source'"):
        load(dataset_name=str(folder))


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("a.tsv", b"a\tb\nc\xe9\td\ne\tf\n", "invalid_utf8", "line 2 has the byte 0xe9 at position 1"),
        ("a.csv", b'source,target\n"a",b\n"c\xe9",d\ne,f\n', "invalid_utf8", "line 3 must hold valid UTF-8"),
        ("a.jsonl", JSON_LINES % b'"c\xe9"', "invalid_utf8", "line 2 has the byte 0xe9"),
        ("a.jsonl", JSON_LINES % b'"\\ud800"', "invalid_utf8", "line 2 must hold valid UTF-8"),
        ("a.json", b"[%s]" % JSON_ROWS % b'"c\xe9"', "invalid_utf8", "record 2 must hold valid UTF-8"),
        ("a.tsv", b"a\tb\nc\ne\tf\n", "malformed", "2 tab-separated columns, got 1 in line 2"),
        ("a.csv", b"source,target\na,b\nc\ne,f\n", "malformed", "2 columns, got 1 in line 3"),
        ("a.jsonl", JSON_LINES % b"null", "malformed", "text 'source', got type NoneType"),
        # Python reads no integer of so many digits.
        ("a.jsonl", JSON_LINES % (b"1" * 5000), "malformed", "got in line 2: Exceeds"),
    ],
)
def test_bad_pairs_are_refused_or_counted(tmp_path, load, name, content, kind, message):
    write(tmp_path, name, content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}.*`{kind}: skip`"):
        load(file=name)
    for _ in range(2):
        report = DataReport()
        assert as_tuples(load(file=name, **{kind: "skip"}, report=report)) == [("a", "b"), ("e", "f")]
        assert (report.read, getattr(report, kind), report.kept) == (3, 1, 2)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.csv", ["", "source,target", "a,b", "", '"c\n\nd",e', "", ""]),
        ("a.json", ["", *map(json.dumps, rows_as_json([("a", "b"), ("c\n\nd", "e")])), " \t", ""]),
    ],
)
def test_blank_lines_of_csv_and_json_are_no_pairs(tmp_path, load, name, lines):
    write(tmp_path, name, "\r\n".join(lines))
    report = DataReport()
    assert as_tuples(load(file=name, report=report)) == [("a", "b"), ("c\n\nd", "e")]
    assert (report.read, report.dropped) == (2, 0)


def test_csv_of_any_fields_but_broken_quotes(tmp_path, load):
    document = "word " * 50_000
    write(tmp_path, "a.csv", f'source,target\nNA,null\n"a\r\nb",""\n{document},x\n')
    texts = as_tuples(load(file="a.csv", max_line_characters=300_000))
    assert texts == [("NA", "null"), ("a\r\nb", ""), (document, "x")]
    write(tmp_path, "broken.csv", 'source,target\na,b\n"c,d\ne,f\n')
    with pytest.raises(ValueError, match="RFC 4180"):
        load(file="broken.csv", malformed="skip")


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.tsv", "a\tb\tc\n", {}, "must name columns in the first line"),
        ("a.tsv", "a\tb\n", {"source_column": 0, "target_column": 2}, "must name columns in the first line"),
        ("a.csv", "en,de\na,b\n", {}, r"it has \['en', 'de'\]"),
        ("a.csv", "en,de\na,b\n", {"source_column": 0, "target_column": 1}, "that .*csv has once, got 0"),
        ("a.xml", "a", {}, "must end in"),
        ("a.tsv", "", {}, "at least one good pair"),
        ("a.tsv", "a\tb\n", {"dataset_name": "x"}, "Pairs must come from one of"),
        ("a.tsv", "a\tb\n", {"source_file": "a.en"}, "Pairs must come from one of"),
        ("a.csv", "source,target,source\na,b,c\n", {}, "a.csv has once, got 'source'"),
        ("a.json", "[{]", {}, "JSON array of objects, got: Expecting"),
    ],
)
def test_refusals(tmp_path, load, name, content, options, message):
    write(tmp_path, name, content)
    with pytest.raises(ValueError, match=message):
        load(file=name, **options)


def test_prefix_goes_before_text_but_not_before_emptiness_and_samples_are_counted(tmp_path, load):
    write(tmp_path, "a.tsv", "a\tb\n \tc\nd\te\n")
    report = DataReport()
    pairs = load(file="a.tsv", source_prefix="summarize: ", max_samples=2, report=report)
    assert as_tuples(pairs) == [("summarize: a", "b"), (" ", "c")]
    assert (report.read, report.beyond_max_samples, report.kept) == (3, 1, 2)


def test_changed_file_is_read_again(tmp_path, load):
    write(tmp_path, "a.tsv", "a\tb\n")
    first = load(file="a.tsv")
    assert load(file="a.tsv").cache_files == first.cache_files
    write(tmp_path, "a.tsv", "c\td\n")
    os.utime(tmp_path / "a.tsv", ns=(1, 1))
    assert as_tuples(load(file="a.tsv")) == [("c", "d")]


def in_memory(pairs) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"source": source, "target": target} for source, target in pairs])


def test_split_keeps_equal_sources_together_and_exact_sizes():
    pairs = [(f"source {index % 40}{' ' * (index // 40 % 2)}", f"target {index}") for index in range(100)]
    pairs += [(f"single {index}", "x") for index in range(20)]
    splits = split_pairs(in_memory(pairs), 11, 7, seed=3)
    assert {name: len(split) for name, split in splits.items()} == {"train": 102, "validation": 11, "test": 7}
    sources = [{source.strip() for source in split["source"]} for split in splits.values()]
    assert not (sources[0] & sources[1] or sources[0] & sources[2] or sources[1] & sources[2])
    assert sorted(pair for split in splits.values() for pair in as_tuples(split)) == sorted(pairs)
    assert as_tuples(splits["train"]) == [pair for pair in pairs if pair in set(as_tuples(splits["train"]))]


def test_split_depends_on_seed_and_text_alone():
    pairs = [(f"s{index}", f"t{index}") for index in range(50)]
    first, turned, other = (
        sorted(split_pairs(in_memory(rows), 5, 0, seed=seed)["validation"]["source"])
        for rows, seed in ((pairs, 1), (pairs[::-1], 1), (pairs, 2))
    )
    # A constant: the same in every process and version.
    assert first == turned == ["s10", "s2", "s22", "s46", "s7"] != other


def test_sources_with_rare_words_stay_in_training():
    pairs = [(f"a {word}", "x") for word in "bcdefg"] + [("h 1", "y"), ("h i 2", "y")]
    pairs = in_memory([*pairs, ("b c", "z"), ("d e", "z")])
    held_out = split_pairs(pairs, 3, 2, keep_rare_words=True)
    # f, g, i, 1 and 2 stand in one source each.
    sources = [*held_out["validation"]["source"], *held_out["test"]["source"]]
    assert not {*" ".join(sources).split()} & {*"fgi12"}
    assert split_pairs(pairs, 3, 2)["train"]["source"] != held_out["train"]["source"]


def test_split_takes_as_many_as_possible_and_leaves_some_for_training():
    pairs = in_memory([("a", "1"), ("a", "2"), ("b", "3"), ("b", "4")])
    for numbers in ((4, 0), (2, 2), (-1, 0)):
        with pytest.raises(ValueError, match="num_validation"):
            split_pairs(pairs, *numbers)
    assert {name: len(split) for name, split in split_pairs(pairs, 3, 1).items()} == {"train": 2, "validation": 2}


@pytest.mark.parametrize("name", ["a.tsv.gz", "a.csv", "a.jsonl", "a.json", "a.parquet", "s.txt"])
def test_long_lines_are_refused_or_counted(tmp_path, load, name):
    pairs = [("a", "b"), ("long " * 30, "x"), ("c", "d")]
    rows = rows_as_json(pairs)
    contents = {
        "a.tsv.gz": "".join(f"{s}\t{t}\n" for s, t in pairs),
        "a.csv": "source,target\n" + "".join(f'"{s}",{t}\n' for s, t in pairs),
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "a.json": json.dumps(rows),
        "s.txt": "".join(f"{s}\n" for s, _ in pairs),
        "t.txt": "".join(f"{t}\n" for _, t in pairs),
    }
    for file, content in contents.items():
        write(tmp_path, file, content)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    options = {"source_file": "s.txt", "target_file": "t.txt"} if name == "s.txt" else {"file": name}
    number = {"a.csv": "line 3", "a.json": "record 2", "a.parquet": "row 1"}.get(name, "line 2")
    with pytest.raises(ValueError, match=r"at most 99 characters, .*`max_line_characters`") as error:
        load(**options, max_line_characters=99)
    assert number in str(error.value) and name in str(error.value)
    assert as_tuples(load(**options, max_line_characters=200)) == pairs
    options |= {"max_line_characters": 99, "line_too_long": "skip"}
    if name == "a.csv":
        # The row may go on in the next line.
        with pytest.raises(ValueError, match="line 3 has more"):
            load(**options)
        return
    report, streamed = DataReport(), DataReport()
    assert as_tuples(load(**options, report=report)) == [pairs[0], pairs[2]]
    assert (report.read, report.line_too_long, report.kept) == (3, 1, 2) and "1 line too long" in str(report)
    paths = {key: tmp_path / value if "file" in key else value for key, value in options.items()}
    assert list(PairSource(**paths).pairs(streamed)) == [pairs[0], pairs[2]] and streamed.line_too_long == 1


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\r\n\ufeff"), max_size=12)
REPEATABLE = settings(max_examples=20, deadline=None, derandomize=True, database=None)


@REPEATABLE
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_any_text_that_is_written_is_read(pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    with open(folder / "a.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("source", "target"), *pairs])
    rows = rows_as_json(pairs)
    write(folder, "a.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write(folder, "a.json.gz", json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    for name in ("a.csv", "a.jsonl", "a.json.gz", "a.parquet"):
        suffix = Path(name.removesuffix(".gz")).suffix
        assert list(READERS[suffix](str(folder / name), (None, None))) == pairs, name


@REPEATABLE
@given(pairs=st.lists(st.tuples(LINES, LINES), min_size=1, max_size=5), end=st.sampled_from(["\n", "\r\n"]))
def test_any_line_that_is_written_is_read(pairs, end, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    header = [("source", "target"), *pairs]
    write(folder, "a.tsv", "".join(f"{source}\t{target}{end}" for source, target in header))
    for name, side in (("s.txt.gz", 0), ("t.txt", 1)):
        write(folder, name, "".join(pair[side] + end for pair in pairs))
    assert list(READERS[".tsv"](str(folder / "a.tsv"), (None, None))) == pairs
    assert list(read_parallel(str(folder / "s.txt.gz"), str(folder / "t.txt"))) == pairs


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_blocks_of_a_file_hold_each_pair_once(tmp_path, monkeypatch, size):
    monkeypatch.setattr(pairs_of_files, "BLOCK_BYTES", size)
    monkeypatch.setattr(pairs_of_files, "_BLOCK_LINES", size)
    texts = [("a", "b"), ("ä" * 40, ""), ("", "x"), *((f"s{number}", "t" * number) for number in range(30))]
    lines = ["\ufeffsource\tnote\ttarget\r\n", *(f"{a}\t-\t{b}\r\n" for a, b in texts), "one column\n"]
    (tmp_path / "a.tsv").write_bytes("".join(lines).encode())
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in texts))
    for index, side in enumerate(("s", "t")):
        (tmp_path / side).write_text("\n".join(pair[index] for pair in texts), encoding="utf-8")
    for files in ({"file": "a.tsv"}, {"file": "a.jsonl"}, {"source_file": "s", "target_file": "t"}):
        source = PairSource(**{name: str(tmp_path / path) for name, path in files.items()}, malformed="skip")
        blocks = [list(source.pairs(block=block)) for block in range(len(source.offsets) - 1)]
        assert [pair for block in blocks for pair in block] == list(source.pairs()) == texts


def test_an_error_in_a_block_says_where_its_lines_are_counted_from(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs_of_files, "BLOCK_BYTES", 8)
    (tmp_path / "a.tsv").write_text("a\tb\n" * 5 + "broken\n", encoding="utf-8")
    source = PairSource(file=str(tmp_path / "a.tsv"))
    with pytest.raises(ValueError, match=r"got 1 in line 2\. Lines are counted from byte 16\. `malformed: skip`"):
        list(source.pairs(block=2))


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "a.tsv.gz", "a.csv"])
def test_a_sample_tells_the_number_of_pairs(tmp_path, monkeypatch, name):
    monkeypatch.setattr(pairs_of_files, "BLOCK_BYTES", 500)
    write = {"a.jsonl": '{{"source": "{0}", "target": "{1}"}}\n'.format, "a.csv": '"{0}","{1}"\n'.format}
    rng = np.random.default_rng(0)
    rows = [write.get(name, "{0}\t{1}\n".format)(*rng.integers(0, 2**40, 2)) for _ in range(4000)]
    text = "".join([*(["source,target\n"] if name == "a.csv" else []), *rows]).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    source = PairSource(file=str(tmp_path / name))
    sample, number = source.sample(500)
    assert 500 <= len(sample) < 600 and abs(number - 4000) < 800
    # Blocks come from all of the file.
    assert (sample["source"][:500] == [pair[0] for pair in list(source.pairs())[:500]]) == (source.offsets is None)
    assert PairSource(file=str(tmp_path / name), max_samples=700).sample(500)[1] == 700
    whole, number = source.sample(5000)
    assert sorted(whole["source"][:]) == sorted(pair[0] for pair in source.pairs()) and number == 4000


def test_machines_that_share_a_cache_read_a_file_once(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    begun, readings = threading.Event(), []

    def read():
        readings.append(1)
        begun.set()
        # The second reader comes meanwhile.
        threading.Event().wait(0.3)
        yield ("the cat",)

    features = datasets.Features({"source": datasets.Value("string")})
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(read_cached, read, features, "key", [])
        begun.wait()
        second = pool.submit(read_cached, read, features, "key", [])
        assert first.result()["source"][:] == second.result()["source"][:] == ["the cat"]
    assert len(readings) == 1

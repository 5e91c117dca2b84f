import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from letter_pair import LetterPair
from small_runs import PAIRS
from small_trainers import with_lengths
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from metaphrase.data.encoding import data_fingerprint, encode_pairs, tokenizer_fingerprint
from metaphrase.data.pairs import DROP_REASONS, DataReport, PairSource, load_pairs
from metaphrase.data.token_budget import PairStream, TokenBudgetStream


def in_memory(*pairs: tuple[str, str]) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"source": source, "target": target} for source, target in pairs])


def encode(*pairs: tuple[str, str], **options):
    limits = {"max_source_length": 4, "max_target_length": 3}
    return encode_pairs(in_memory(*pairs), LetterPair(), **{**limits, **options})


def test_ids_lengths_and_order():
    encoded, report = encode(("ab", "c"), ("a", "a"), ("abc", "de"), keep_text=True)
    assert encoded.column_names == ["source", "target", "input_ids", "labels", "source_length", "target_length"]
    assert encoded["input_ids"][:] == [[97, 98, 1], [97, 1], [97, 98, 99, 1]]
    assert encoded["labels"][:] == [[99, 2], [97, 2], [100, 101, 2]]
    assert encoded["source_length"][:] == [3, 2, 4]
    assert encoded["target_length"][:] == [2, 2, 3]
    assert (report.read, report.kept) == (3, 3)
    assert report.source_lengths == {"mean": 3.0, "percentile_95": pytest.approx(3.9), "longest": 4}


def test_each_dropped_pair_has_one_reason():
    dropped = [("", ""), (" \u3000\t", "b"), ("~", "b"), ("a", "\xa0"), ("abcd", "bcde"), ("a", "abc")]
    encoded, report = encode(("a", "b"), *dropped, ("ab", "a"))
    assert encoded["input_ids"][:] == [[97, 1], [97, 98, 1]]
    assert encoded.column_names == ["input_ids", "labels", "source_length", "target_length"]
    counts = {reason: getattr(report, reason) for reason in DROP_REASONS if getattr(report, reason)}
    assert counts == {"empty_source": 3, "empty_target": 1, "source_too_long": 1, "target_too_long": 1}
    assert report.read == report.kept + report.dropped == 8
    assert "3 empty source, 1 empty target, 1 source too long, 1 target too long" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["source_lengths"]["longest"] == 3


def test_a_text_without_ids_between_beginning_and_end_is_empty():
    class FramedPair(LetterPair):
        def encode_sources(self, texts: list[str]) -> list[list[int]]:
            return [[3, *ids] for ids in super().encode_sources(texts)]

    limits = {"max_source_length": None, "max_target_length": None}
    encoded, report = encode_pairs(in_memory(("~", "b"), ("a", "b")), FramedPair(), **limits)
    assert encoded["input_ids"][:] == [[3, 97, 1]]
    assert (report.empty_source, report.kept) == (1, 1)


def test_truncation_keeps_the_end_and_is_counted():
    encoded, report = encode(("abcdef", "abc"), ("abc", "ab"), ("ab", "xyz"), ("", "abcdef"), too_long="truncate")
    assert encoded["input_ids"][:] == [[97, 98, 99, 1], [97, 98, 99, 1], [97, 98, 1]]
    assert encoded["labels"][:] == [[97, 98, 2], [97, 98, 2], [120, 121, 2]]
    assert (report.source_truncated, report.target_truncated, report.empty_source, report.kept) == (1, 2, 1, 3)
    assert "truncated: 1 sources, 2 targets" in str(report)


def test_errors_name_the_pair():
    with pytest.raises(ValueError, match=r"row 1 5 and 2 tokens: 'abcd', 'a'"):
        encode(("a", "a"), ("abcd", "a"), too_long="error")
    with pytest.raises(ValueError, match=r"empty, got in row 1 2 and 1 tokens: 'a', ' '"):
        encode(("a", "a"), ("a", " "), empty="error")
    with pytest.raises(ValueError, match=r"0 of 2 pairs kept; not used: 1 empty source, 1 source too long"):
        encode(("", "a"), ("abcdefg", "a"))
    encoded, report = encode(("", "a"), ("a", ""), empty="keep")
    assert (encoded["input_ids"][:], encoded["labels"][:], report.dropped) == ([[1], [97, 1]], [[97, 2], [2]], 0)


def test_the_report_of_reading_is_continued_and_not_changed():
    before = DataReport(read=10, malformed=2, invalid_utf8=1)
    _, report = encode(("a", "b"), ("", "b"), report=before)
    assert (report.read, report.malformed, report.invalid_utf8, report.other_splits) == (10, 2, 1, 5)
    assert "; 5 taken out for validation or test; not used: 2 malformed, 1 invalid UTF-8" in str(report)
    assert (report.empty_source, report.kept) == (1, 1)
    assert before == DataReport(read=10, malformed=2, invalid_utf8=1)


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "</s>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


class WordPair:
    def __init__(self, source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast):
        self.source, self.target = source, target
        type(self).calls = 0

    def encode_sources(self, texts: list[str]) -> list[list[int]]:
        # The question for what ends a text, which is asked even if the cache answers.
        type(self).calls += texts[:1] != [""]
        return self.source(texts)["input_ids"]

    def encode_targets(self, texts: list[str]) -> list[list[int]]:
        return self.target(texts)["input_ids"]


def encode_on_disk(folder: Path, words: list[str], **options) -> tuple[int, str, list]:
    """Reads and encodes the pairs of `folder`; returns the calls of the tokenizer, the report and the result."""
    pairs = load_pairs(file=folder / "a.tsv", source_prefix="go ")
    tokenizers = WordPair(word_tokenizer(words), word_tokenizer(words))
    limits = {"max_source_length": 4, "max_target_length": 4}
    encoded, report = encode_pairs(pairs, tokenizers, **{**limits, **options})
    return WordPair.calls, str(report), encoded.to_list()


@pytest.mark.slow
def test_cache_is_hit_by_another_process_and_counts_there_too(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.tsv").write_text("one\ttwo\none two three four\ttwo\n\tone\n")
    calls, *first = encode_on_disk(tmp_path, ["go", "one", "two"])
    assert calls == 1
    program = (
        "import runpy, json, pathlib;"
        f"module = runpy.run_path({str(Path(__file__).resolve())!r});"
        f"print(json.dumps(module['encode_on_disk'](pathlib.Path({str(tmp_path)!r}), ['go', 'one', 'two'])))"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    calls, *second = json.loads(done.stdout.splitlines()[-1])
    assert calls == 0
    assert second == first


def test_cache_is_not_hit_when_anything_that_matters_changes(tmp_path):
    (tmp_path / "a.tsv").write_text("one\ttwo\n")
    assert encode_on_disk(tmp_path, ["go", "one", "two"])[0] == 1
    assert encode_on_disk(tmp_path, ["go", "one", "two"])[0] == 0
    assert encode_on_disk(tmp_path, ["go", "two", "one"])[0] == 1
    assert encode_on_disk(tmp_path, ["go", "one", "two"], max_source_length=3)[0] == 1
    assert encode_on_disk(tmp_path, ["go", "one", "two"], keep_text=True)[0] == 1


def test_fingerprint_forgets_what_a_call_leaves_behind():
    used, fresh = (WordPair(word_tokenizer(["a"]), word_tokenizer(["b"])) for _ in range(2))
    used.source(["a a a", "a"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(used) == tokenizer_fingerprint(fresh)
    swapped = WordPair(fresh.target, fresh.source)
    assert tokenizer_fingerprint(swapped) != tokenizer_fingerprint(fresh)


def test_equal_pairs_have_the_same_fingerprint_and_other_pairs_another():
    rows = with_lengths(PAIRS)
    first, again = map(data_fingerprint, (rows, rows.select(range(len(PAIRS)))))
    assert first == again and first["num_pairs"] == len(PAIRS)
    hashes = {first["hash"]}
    others = [PAIRS[:-1], PAIRS[::-1], [*PAIRS[:-1], {"input_ids": [5, 2], "labels": [9, 2]}]]
    others.append([{"input_ids": pair["labels"], "labels": pair["input_ids"]} for pair in PAIRS])
    others.append([{**pair, "weight": 0.5} for pair in PAIRS])
    for pairs in others:
        hashes.add(data_fingerprint(with_lengths(pairs))["hash"])
    assert len(hashes) == 1 + len(others)


def test_all_lengths_count_and_where_a_block_of_text_ends():
    many = [{"input_ids": [5, 2], "labels": [6, 2]}] * 2500
    # The ids of this row are not sampled.
    other = [*many[:1], {"input_ids": [5, 2], "labels": [6, 7, 2]}, *many[2:]]
    assert data_fingerprint(with_lengths(many)) != data_fingerprint(with_lengths(other))
    blocks = [datasets.Dataset.from_dict({"input_ids": rows}) for rows in ([[1, 2], [3]], [[1], [2, 3]])]
    assert data_fingerprint(blocks[0]) != data_fingerprint(blocks[1])
    # The noise of blocks does not count.
    assert data_fingerprint(SimpleNamespace(blocks=blocks[0])) == data_fingerprint(blocks[0]) is not None


def stream_of(files, **options):
    texts = PairSource(source_file=files[0], target_file=files[1], **options)
    return TokenBudgetStream(PairStream(texts, LetterPair(), max_source_length=9, max_target_length=9), 64, seed=0)


def test_the_fingerprint_of_a_stream_is_that_of_its_files_and_settings(tmp_path):
    files = [tmp_path / name for name in ("source", "target")]
    for file in files:
        file.write_text("ab\n" * 100_000, encoding="utf-8")
    first = data_fingerprint(stream_of(files))
    assert first["num_bytes"] == 600_000
    # The folder and the time of change do not count.
    moved = [file.rename(tmp_path / f"{file.name}.txt") for file in files]
    assert data_fingerprint(stream_of(moved)) == first != data_fingerprint(stream_of(moved, source_prefix="x"))
    text = "ab\n" * 100_000
    for changed in (text + "ab\n", "cd\n" + text[3:], text[:-3] + "cd\n"):
        moved[1].write_text(changed, encoding="utf-8")
        assert data_fingerprint(stream_of(moved)) != first

"""Tests of judges: a MetricX of random weights beside a plain loop of transformers, functions, and the subcommands."""

import json
import sys

import pytest
import torch
from subcommands import execute
from tiny_generator import save_generator, tiny_generator
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from metaphrase.analysis.judges import load_judge
from metaphrase.conversion import convert

SOURCES = ["a dog runs", "the cat sleeps here", "a"]
TARGETS = ["ein Hund", "die Katze schläft", "b"]
REFERENCES = ["ein Hund läuft", "die Katze schläft hier", "ein"]


@pytest.fixture(scope="module")
def metricx(tmp_path_factory):
    """A folder of mT5 with a tokenizer of characters, as MetricX's class saves it."""
    folder = tmp_path_factory.mktemp("judge") / "metricx-24-tiny"
    entries = ["<pad>", "</s>", "<unk>", "<extra_id_10>", *map(chr, range(32, 127)), "ä"]
    inner = Tokenizer(models.WordLevel({entry: number for number, entry in enumerate(entries)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special, extra_special_tokens=["<extra_id_10>"])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    fields = {"vocab_size": len(entries), "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = AutoConfig.for_model("mt5", **fields, decoder_start_token_id=0, initializer_factor=8.0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.lm_head.weight.data[3] = model.lm_head.weight.data[3].abs()
    model.save_pretrained(folder)
    return folder


def plain_scores(folder, prompts, limit=1536):
    """Score one prompt after the other, as google-research/metricx does."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model, scores = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), []
    for prompt in prompts:
        ids = tokenizer(prompt, truncation=True, max_length=limit, return_tensors="pt").input_ids[:, :-1]
        with torch.no_grad():
            logits = model(input_ids=ids, decoder_input_ids=torch.zeros(1, 1).long()).logits
        scores.append(logits[0, 0, 3].clamp(0, 25).item())
    return scores


@pytest.mark.parametrize("year", ["24", "23"])
def test_metricx_equals_a_plain_loop(year, metricx, tmp_path):
    convert(metricx, tmp_path / f"metricx-{year}-ours")
    rows = list(zip(SOURCES, TARGETS, REFERENCES, strict=True))
    if year == "24":
        prompts = [f"source: {source} candidate: {target}" for source, target, _ in rows]
        with_reference = [f"{text} reference: {row[2]}" for text, row in zip(prompts, rows, strict=True)]
    else:
        prompts = [f"candidate: {target} source: {source}" for source, target, _ in rows]
        with_reference = [f"candidate: {target} reference: {reference}" for _, target, reference in rows]
    judge = load_judge(str(tmp_path / f"metricx-{year}-ours"))
    for references, texts in ((None, prompts), (REFERENCES, with_reference)):
        expected = plain_scores(metricx, texts)
        assert judge.score(SOURCES, TARGETS, references) == pytest.approx(expected, abs=1e-4) and max(expected) > 0
    assert judge.is_better_lower


def test_long_texts_are_cut_as_by_metricx(metricx):
    judge, target = load_judge(str(metricx)), "b" * 1600
    expected = plain_scores(metricx, [f"source: a candidate: {target}"])
    assert judge.score(["a"], [target], None) == pytest.approx(expected, abs=1e-4)


def length(sources, targets, references):
    return [len(target) for target in targets]


def broken(sources, targets, references):
    return [float("nan")] * len(targets)


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_scores", sys.modules[__name__])
    return "own_scores"


def test_a_function_judges(module):
    judge = load_judge(f"{module}:length")
    segments = judge.segments(SOURCES, TARGETS, None)
    assert segments.score() == sum(map(len, TARGETS)) / 3 and not judge.is_better_lower
    with pytest.raises(ValueError, match="must return finite scores, got nan for text 1"):
        load_judge(f"{module}:broken").segments(SOURCES, TARGETS, None)
    with pytest.raises(ValueError, match="must return 2 scores, got 3"):
        judge._replace(score=lambda *_: [1, 2, 3]).segments(SOURCES[:2], TARGETS[:2], None)


@pytest.mark.parametrize("name", ["own_scores:missing", "no_such_module:score"])
def test_a_function_that_is_missing_is_named(name, module):
    with pytest.raises(ValueError, match=f"`metric` must name a module and its function, got '{name}'"):
        load_judge(name)


def test_evaluate_and_compare_take_judges(module, tmp_path, capsys):
    folder = save_generator(tiny_generator(kind="byte"), tmp_path / "model")
    for name, lines in (("source", SOURCES), ("target", REFERENCES), ("first", TARGETS), ("second", SOURCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    files = ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    words = [*files, "--metric", f"{module}:length", "--output", str(tmp_path / "metrics.json")]
    execute("evaluate", [str(folder), *words, "--max_new_tokens", "4", "--metrics", "chrf"])
    scores = json.loads((tmp_path / "metrics.json").read_text("utf-8"))["scores"]
    assert scores["length"]["score"] <= 4 and scores["length"]["signature"] == "mean|judge:length"
    outputs = [str(tmp_path / "first"), str(tmp_path / "second")]
    execute("compare", [*outputs, *files, "--metric", f"{module}:length", "--metrics", "chrf"])
    assert "length" in capsys.readouterr().out
    with pytest.raises(ValueError, match="`source` must be given with `metric`"):
        execute("compare", [*outputs, *files[2:], "--metric", f"{module}:length"])

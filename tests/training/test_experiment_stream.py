import json
import shutil

import pytest
import torch
from small_experiments import ONE_STEP, make_recipe, read_log, train, weights
from subcommands import execute
from tiny_generator import save_generator, tiny_generator
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from metaphrase.augmentation.denoising import DEFAULT_SENTINELS
from metaphrase.choices import estimate
from metaphrase.choices.estimate import dry_run
from metaphrase.data.token_budget import PairStream, TokenBudgetStream
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.texts import TERM_TOKENS
from metaphrase.training.experiment import Experiment

STREAM = {"streaming": "true", "max_tokens_per_batch": 200, "pairs_in_buffer": 25, "per_device_train_batch_size": None}
STREAM |= {"max_source_length": 90, "max_target_length": 90}


def test_streamed_training_resumes_to_the_weights_of_one_that_did_not_stop(data, tmp_path, monkeypatch, caplog):
    fields = STREAM | {"max_steps": 30, "save_steps": 20, "eval_strategy": "no"}
    result = Experiment(make_recipe(data, tmp_path / "whole", **fields)).train()
    assert result["num_examples"] == 8
    account = json.loads((tmp_path / "whole" / "data_report.json").read_text(encoding="utf-8"))
    assert 0 < account["train"]["read"] <= 60
    # Without this checkpoint, a run has stopped after step 20, in the second or third pass over the pairs.
    ignored = shutil.ignore_patterns("checkpoint-30", "*.safetensors")
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut", ignore=ignored)
    shutil.copy(tmp_path / "whole" / "checkpoint-20" / "model.safetensors", cut / "checkpoint-20")
    Experiment(make_recipe(data, cut, **fields, resume_from_checkpoint="true")).train()
    expected, actual = weights(tmp_path / "whole"), weights(cut)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    # Places are those of as many workers: others read the batches that they skip, with a warning.
    calls, resume = [], TokenBudgetStream.resume
    monkeypatch.setattr(TokenBudgetStream, "resume", lambda *call: calls.append(call[2]) or resume(*call))
    monkeypatch.setattr(PairStream, "share_counts", lambda *_: calls.append("counts"))
    fields |= {"dataloader_num_workers": 1, "max_steps": 31}
    Experiment(make_recipe(data, cut, **fields, resume_from_checkpoint="true")).train()
    assert calls == [{}, "counts"] and "another position" in caplog.text


@pytest.mark.parametrize("fields", [{"max_tokens_per_batch": 179}, {"max_tokens_per_batch": None}, {"max_steps": -1}])
def test_a_batch_of_a_stream_can_hold_whatever_pair_comes(data, tmp_path, fields):
    recipe = make_recipe(data, tmp_path / "run", **STREAM | {"max_steps": 1, "eval_strategy": "no"} | fields)
    with pytest.raises(ValueError, match=r"`streaming` must come with `max_steps`.* at least .*, got .*, 90 and 90"):
        Experiment(recipe).prepare()


def test_validation_pairs_are_taken_out_of_a_stream(data, tmp_path):
    fields = STREAM | {"validation_file": None, "num_validation": 7, "max_steps": 4, "save_strategy": "no"}
    lines = (data / "train.tsv").read_text(encoding="utf-8").splitlines()
    experiment = Experiment(make_recipe(data, tmp_path / "run", **fields))
    corpus, tokenizers, encoded = experiment.prepare()
    held_out = set(corpus.splits["validation"]["source"][:])
    sources = tokenizers.decode_targets([pair["input_ids"] for pair in streamed(encoded["train"])])
    assert len(corpus.splits["validation"]) == 7 and not held_out.intersection(sources)
    assert corpus.reports["train"].report.other_splits == 7 and len(sources) + 7 == len(lines)


def test_a_dry_run_counts_a_stream_by_its_sample(data, tmp_path, monkeypatch):
    fields = STREAM | {"max_steps": 4, "eval_strategy": "no"}
    stream, whole = ({"streaming": value} for value in ("true", "false"))
    whole = dry_run(Experiment(make_recipe(data, tmp_path / "run", **fields | whole)))
    for most, tolerance in ((1000, 0), (20, 0.1)):
        monkeypatch.setattr(estimate, "_ENCODED_PAIRS", most)
        found = dry_run(Experiment(make_recipe(data, tmp_path / "run", **fields | stream)))
        assert (found.pairs, found.source_tokens) == pytest.approx((whole.pairs, whole.source_tokens), rel=tolerance)


def test_a_changed_file_under_a_stream_is_refused_when_a_run_goes_on(data, tmp_path):
    fields = STREAM | {"max_steps": 2, "save_steps": 1, "eval_strategy": "no", "test_file": None}
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    recipe = make_recipe(data, tmp_path / "run", **fields | {"max_steps": 3}, resume_from_checkpoint="true")
    with (data / "train.tsv").open("a", encoding="utf-8") as lines:
        lines.write("one\tmore\n")
    with pytest.raises(ValueError, match=r"`data` must stay as before when a run is resumed, got .*num_bytes"):
        Experiment(recipe).train()


@pytest.mark.parametrize("objective", ["span_corruption", "ul2", "text_infilling", "prefix_lm"])
def test_plain_text_trains_by_a_denoising_objective(data, tmp_path, objective):
    fields = {"objective": objective, "train_text_file": "train.de", "validation_text_file": "validation.de"}
    fields |= dict.fromkeys(("train_file", "validation_file", "test_file"))
    tokens = {"text_infilling": "<mask>", "prefix_lm": "</s>"}
    fields |= {"max_source_length": 48, "num_sentinels": None if objective in tokens else 60}
    fields |= {"max_tokens_per_batch": 400, "max_target_length": 60, "save_strategy": "no", "invalid_utf8": "skip"}
    with open(data / "train.de", "ab") as file:
        file.write(b"\xff\n")
    experiment = Experiment(make_recipe(data, tmp_path / "run", **fields))
    assert experiment.train() == {}
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(losses) == 2 and losses[1] < losses[0]
    account = json.loads((tmp_path / "run" / "data_report.json").read_text(encoding="utf-8"))
    assert (account["train"]["documents"], account["train"]["invalid_documents"]) == (61, 1)
    tokenizers = TokenizerPair.from_pretrained(tmp_path / "run")
    assert tokens.get(objective, "<extra_id_0>") in tokenizers.source.get_vocab()
    assert ("<extra_id_0>" in tokenizers.source.get_vocab()) == (objective not in tokens)


def test_an_existing_tokenizer_gets_the_tokens_of_an_objective(data, tmp_path):
    base = save_generator(tiny_generator(kind="byte", layers=1), tmp_path / "base")
    fields = {"objective": "span_corruption", "train_text_file": "train.de", "tokenizer_kind": None, "vocab_size": None}
    fields |= dict.fromkeys(("train_file", "validation_file", "test_file", "preset")) | {"eval_strategy": "no"}
    fields |= {"max_steps": 1, "save_strategy": "no", "num_sentinels": None, "max_source_length": 48}
    Experiment(make_recipe(data, tmp_path / "run", **fields, model_name_or_path=base)).train()
    before, after = (TokenizerPair.from_pretrained(folder).source for folder in (base, tmp_path / "run"))
    assert len(after) == len(before) + DEFAULT_SENTINELS and "<extra_id_99>" in after.get_vocab()
    fields["max_source_length"] = 40
    Experiment(make_recipe(data, tmp_path / "again", **fields, model_name_or_path=tmp_path / "run")).train()
    assert len(TokenizerPair.from_pretrained(tmp_path / "again").source) == len(after)


def prepared(data, folder, **fields):
    experiment = Experiment(make_recipe(data, folder, **fields))
    data = experiment.prepare()
    return data.corpus, data.encoded, data.tokenizers


def streamed(train):
    return [pair for _, chunk in train.read.chunks(0) for pair in chunk]


KINDS = pytest.mark.parametrize(
    "kind",
    [
        {},
        {"streaming": "true", "max_tokens_per_batch": 600, "max_steps": 1},
        {"tasks": "{a: {train_file: train.tsv, source_prefix: 'a: '}}", "train_file": None, "validation_file": None},
    ],
)


@KINDS
def test_only_training_pairs_change(data, tmp_path, kind):
    fields = ONE_STEP | {"validation_file": "validation.tsv", "subword_sampling": 0.3, "augmentation.uppercase": 1.0}
    fields |= kind
    corpus, encoded, tokenizers = prepared(data, tmp_path / "run", **fields)
    train = encoded["train"]
    pairs = streamed(train)[:20] if "streaming" in kind else [train[row] for row in range(20)]
    prefix = "a: " if "tasks" in kind else ""
    for side, ids in (("source", "input_ids"), ("target", "labels")):
        texts = tokenizers.decode_targets([pair[ids] for pair in pairs])
        start = len(prefix) if side == "source" else 0
        lines = (data / "train.tsv").read_text(encoding="utf-8").splitlines()
        expected = [line.split("\t")[side == "target"].upper() for line in lines[: len(pairs)]]
        assert [text[start:] for text in texts] == expected and texts[0][:start] == prefix[:start]
    if "tasks" not in kind:
        plain = tokenizers.encode_targets(corpus.splits["validation"]["target"][:])
        assert encoded["validation"]["labels"][:] == plain


WEIGHTED = {"train_file": "train.jsonl", "weight_column": "w", "num_validation": 0, "max_source_length": 256}
WEIGHTED |= {"max_target_length": 256}
AUGMENTED, STREAMED = WEIGHTED | {"augmentation.uppercase": 0.5}, {"streaming": "true"}
TASKS = {"tasks": "{a: {train_file: train.jsonl, weight_column: w}, b: {train_file: train.tsv}}", "train_file": None}


@pytest.mark.parametrize("kind", [WEIGHTED, AUGMENTED, WEIGHTED | STREAMED, AUGMENTED | STREAMED, TASKS])
def test_the_loss_of_a_run_has_the_weights_of_its_file(data, tmp_path, kind):
    rows = [line.split("\t") for line in (data / "train.tsv").read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({"source": s, "target": t, "w": number % 3}) for number, (s, t) in enumerate(rows)]
    (data / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    fields = ONE_STEP | {"per_device_train_batch_size": None, "max_tokens_per_batch": 100_000, "learning_rate": 0}
    fields |= {"label_smoothing_factor": 0, "model.dropout": 0, "save_strategy": "no"} | kind
    make_recipe(data, tmp_path / "run", **fields).save(tmp_path / "recipe.yaml")
    places = ["--data_dir", str(data), "--output_dir", str(tmp_path / "run")]
    execute("train", [str(tmp_path / "recipe.yaml"), *places])
    _, encoded, _ = prepared(data, tmp_path / "again", **fields)
    train = encoded["train"]
    pairs = streamed(train) if "streaming" in kind else [train[row] for row in range(len(train))]
    model, total, count = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").eval(), 0.0, 0
    for number, pair in enumerate(pairs):
        ids, labels = (torch.tensor([pair[name]]) for name in ("input_ids", "labels"))
        loss = model(input_ids=ids, labels=labels).loss.item() * labels.numel()
        total, count = total + loss * (number % 3 if number < 60 else 1), count + labels.numel()
    assert read_log(tmp_path / "run", "loss")[0]["loss"] == pytest.approx(total / count, rel=1e-4)


@KINDS
def test_sources_have_terms_of_their_targets(data, tmp_path, kind):
    fields = ONE_STEP | {"augmentation.terms": 1.0} | kind
    _, encoded, tokenizers = prepared(data, tmp_path / "run", **fields)
    train = encoded["train"]
    pairs = streamed(train)[:40] if "streaming" in kind else [train[row] for row in range(40)]
    marks = tokenizers.source.convert_tokens_to_ids(list(TERM_TOKENS))
    assert tokenizers.source.unk_token_id not in marks
    num_terms = 0
    for pair in pairs:
        starts, ends = ([place for place, token in enumerate(pair["input_ids"]) if token == mark] for mark in marks)
        rows = [pair["input_ids"][start + 1 : end] for start, end in zip(starts, ends, strict=True)]
        terms = tokenizers.decode_targets(rows)
        assert all(term.strip() in tokenizers.decode_targets([pair["labels"]])[0] for term in terms)
        num_terms += len(terms)
    assert num_terms > 10


def test_a_fine_tuned_model_gets_the_marks_of_terms(data, run_of_one_step, tmp_path):
    fields = {"model_name_or_path": run_of_one_step, "augmentation.terms": 0.5}
    train(data, tmp_path / "run", **ONE_STEP | fields)
    tokenizers = TokenizerPair.from_pretrained(tmp_path / "run")
    assert set(TERM_TOKENS) <= set(tokenizers.source.get_vocab())
    sizes = [AutoConfig.from_pretrained(folder).vocab_size for folder in (run_of_one_step, tmp_path / "run")]
    assert sizes[1] == sizes[0] + len(TERM_TOKENS)

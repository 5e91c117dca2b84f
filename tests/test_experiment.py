"""The experiment: recipes carried out end to end on a few made-up pairs."""

import json
import logging
import shutil

import pytest
import torch
from small_experiments import make_recipe
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainingArguments

from metaphrase.inference import Generator
from metaphrase.tokenization import TokenizerPair
from metaphrase.training import evaluation, metrics, precision
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe import load_recipe


def weights(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()


def test_a_recipe_becomes_a_folder_that_transformers_loads(data, tmp_path):
    output = tmp_path / "run"
    result = Experiment(make_recipe(data, output, metrics=["bleu", "exact_match"])).train()
    assert set(result["scores"]) == {"bleu", "exact_match"}
    assert result["scores"]["bleu"]["signature"].startswith("nrefs:1|")
    assert result["num_examples"] == 8
    assert json.loads((output / "metrics.json").read_text()) == result
    report = json.loads((output / "data_report.json").read_text())
    assert report["train"]["kept"] == 60
    state = json.loads((output / "trainer_state.json").read_text())
    evaluations = [entry for entry in state["log_history"] if "eval_bleu" in entry]
    assert [entry["step"] for entry in evaluations] == [3, 6]
    assert all(entry["eval_loss"] > 0 and entry["eval_perplexity"] > 1 for entry in evaluations)
    assert load_recipe(output / "recipe.yaml").model["hidden_size"] == 16
    assert len((output / "test_predictions.txt").read_text(encoding="utf-8").splitlines()) == 8

    tokenizer, model = AutoTokenizer.from_pretrained(output), AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.generation_config.max_length == 12
    texts = ["The cat is black.", "He sleeps."]
    outputs = model.generate(**tokenizer(texts, return_tensors="pt", padding=True))
    expected = Generator.from_pretrained(output).generate(texts)
    assert tokenizer.batch_decode(outputs, skip_special_tokens=True) == expected


def test_a_run_that_was_stopped_ends_as_one_that_was_not(data, tmp_path):
    Experiment(make_recipe(data, tmp_path / "whole")).train()
    Experiment(make_recipe(data, tmp_path / "parts", max_steps=6)).train()
    for leftover in ("model.safetensors", "checkpoint-6"):
        path = tmp_path / "parts" / leftover
        if path.is_dir():
            for file in sorted(path.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            path.rmdir()
        else:
            path.unlink()
    Experiment(make_recipe(data, tmp_path / "parts", resume_from_checkpoint="true")).train()
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_separate_vocabularies(data, tmp_path):
    recipe = make_recipe(data, tmp_path / "run", joint_vocabulary="false", vocab_size=400, target_vocab_size=500)
    Experiment(recipe).train()
    pair = TokenizerPair.from_pretrained(tmp_path / "run")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert not pair.is_joint
    assert model.model.encoder.embed_tokens.weight.shape[0] == len(pair.source)
    assert model.lm_head.weight.shape[0] == len(pair.target)
    assert len(pair.source) != len(pair.target)
    assert len(Generator.from_pretrained(tmp_path / "run").generate(["He sleeps."])) == 1


def test_pretokenized_text_is_scored_joined(data, tmp_path, monkeypatch):
    for name in ("train.de", "validation.de", "test.de"):
        path = data / name
        path.write_text(path.read_text(encoding="utf-8").replace("er ", "@@ er "), encoding="utf-8")
    fields = {"tokenizer_kind": "pretokenized", "vocab_size": None, "bleu_tokenize": "none"}
    for split in ("train", "validation", "test"):
        fields |= {f"{split}_file": None, f"{split}_source_file": f"{split}.en", f"{split}_target_file": f"{split}.de"}
    recipe = make_recipe(data, tmp_path / "run", **fields)
    joined, as_decoded = [], TokenizerPair.as_decoded
    monkeypatch.setattr(
        TokenizerPair, "as_decoded", lambda self, texts: joined.append(as_decoded(self, texts)) or joined[-1]
    )
    result = Experiment(recipe).train()
    assert "tok:none" in result["scores"]["bleu"]["signature"]
    pieces = TokenizerPair.from_pretrained(tmp_path / "run").encode_targets((data / "test.de").read_text().splitlines())
    assert result["num_target_tokens"] == sum(map(len, pieces))
    # A model that was there before knows the joiner too.
    fields |= {"tokenizer_kind": None, "preset": None, "model": None, "model_name_or_path": str(tmp_path / "run")}
    Experiment(make_recipe(data, tmp_path / "again", **fields)).train()
    assert len(joined) == 4 and joined[:2] == joined[2:]
    assert not any("@@" in text for texts in joined for text in texts)


def test_what_was_decoded_is_kept_when_it_cannot_be_scored(data, tmp_path, monkeypatch):
    fields = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    monkeypatch.setattr(evaluation, "compute_metrics", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert len((tmp_path / "run" / "test_predictions.txt").read_text(encoding="utf-8").splitlines()) == 8


def test_task_prefix_reaches_the_model_but_not_the_vocabulary(data, tmp_path):
    recipe = make_recipe(data, tmp_path / "run", source_prefix="zzqzz: ", vocab_size=400)
    experiment = Experiment(recipe)
    experiment.corpus.load()
    assert all(source.startswith("zzqzz: ") for source in experiment.corpus.splits["train"]["source"])
    tokenizers = experiment.make_tokenizers()
    assert not any("zz" in token for token in tokenizers.source.get_vocab())


def test_validation_and_test_can_be_taken_out_of_train(data, tmp_path):
    fields = {"validation_file": None, "test_file": None, "num_validation": 5, "num_test": 4}
    result = Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert (result["num_examples"], result["data"]["num_train"]) == (4, 51)


def test_pairs_with_an_empty_side_are_scored_but_not_trained_on_and_counted_so(data, tmp_path):
    fields = {
        "train_file": "some.tsv",
        "validation_file": "few.tsv",
        "test_file": None,
        "max_steps": 2,
        "eval_steps": 2,
    }
    (data / "some.tsv").write_text("the cat\tdie Katze\n\tein Hund\na dog\t \na dog\tein Hund\n", encoding="utf-8")
    (data / "few.tsv").write_text("the dog\tder Hund\n \teine Katze\na cat\t\n", encoding="utf-8")
    result = Experiment(make_recipe(data, tmp_path / "run", save_strategy="no", **fields)).train()
    assert result["data"].items() >= {"num_train": 2, "num_validation": 3}.items() and result["num_examples"] == 3
    report = json.loads((tmp_path / "run" / "data_report.json").read_text(encoding="utf-8"))
    assert [(report[split]["kept"], report[split]["dropped"]) for split in ("train", "validation")] == [(2, 2), (3, 0)]
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text(encoding="utf-8"))
    evaluated = next(entry for entry in state["log_history"] if "eval_loss" in entry)
    assert evaluated["eval_loss"] == pytest.approx(result["loss"], rel=1e-4)
    assert evaluated["eval_chrf"] == pytest.approx(result["scores"]["chrf"]["score"])
    with pytest.raises(ValueError, match="Neither side of a pair may be empty"):
        Experiment(make_recipe(data, tmp_path / "other", **fields | {"train_file": "train.tsv"}, empty="error")).train()


def test_fine_tuning_starts_from_the_given_weights(data, tmp_path):
    Experiment(make_recipe(data, tmp_path / "first")).train()
    fields = {"model_name_or_path": str(tmp_path / "first"), "preset": None, "vocab_size": None, "learning_rate": 0.0}
    Experiment(make_recipe(data, tmp_path / "second", **fields)).train()
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_weights_in_half_precision_are_trained_in_float32(data, tmp_path, caplog):
    base, fields = tmp_path / "base", {"eval_strategy": "no", "test_file": None, "validation_file": None}
    Experiment(make_recipe(data, base, max_steps=1, save_strategy="no", **fields)).train()
    AutoModelForSeq2SeqLM.from_pretrained(base).half().save_pretrained(base)
    assert {weight.dtype for weight in weights(base).values()} == {torch.float16}
    # A step so small that it is lost in half precision.
    fields |= {"model_name_or_path": base, "preset": None, "vocab_size": None, "learning_rate": 1e-6}
    with caplog.at_level("INFO"):
        Experiment(make_recipe(data, tmp_path / "fine", max_steps=1, save_strategy="no", **fields)).train()
    assert "which are in torch.float16, are trained in float32" in caplog.text
    before, after = weights(base), weights(tmp_path / "fine")
    assert all(weight.dtype == torch.float32 for weight in after.values())
    assert any(not torch.equal(after[name], weight.float()) for name, weight in before.items())


def test_early_stopping_and_best_checkpoint(data, tmp_path):
    fields = {
        "early_stopping_patience": 1,
        "load_best_model_at_end": "true",
        "metric_for_best_model": "loss",
        "learning_rate": 0.0,
        "max_steps": 30,
    }
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    # Nothing is learned, so the second evaluation is no better than the first, and that is the end.
    assert state["global_step"] == 6
    assert state["best_model_checkpoint"].endswith("checkpoint-3")


def test_several_gpus_need_a_process_each(data, tmp_path, monkeypatch):
    experiment = Experiment(make_recipe(data, tmp_path / "run"))
    monkeypatch.setattr(Seq2SeqTrainingArguments, "n_gpu", 2)
    with pytest.raises(
        ValueError, match=r"got one process with 2 GPUs. .*torchrun --nproc_per_node 2 .*accelerate launch"
    ):
        experiment.train()
    assert not (tmp_path / "run").exists()


def test_unknown_field_of_the_network_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'hidden_size'"):
        Experiment(make_recipe(data, tmp_path / "run", **{"model.hiden_size": 8})).train()
    with pytest.raises(ValueError, match="must name its training pairs"):
        Experiment(make_recipe(data, tmp_path / "run", train_file=None, validation_file=None, test_file=None))


def test_streamed_training_resumes_to_the_weights_of_one_that_did_not_stop(data, tmp_path):
    fields = {
        "streaming": "true",
        "max_tokens_per_batch": 200,
        "pairs_in_buffer": 25,
        "per_device_train_batch_size": None,
    }
    fields |= {"max_steps": 30, "save_steps": 20, "eval_strategy": "no"}
    result = Experiment(make_recipe(data, tmp_path / "whole", **fields)).train()
    assert result["num_examples"] == 8
    account = json.loads((tmp_path / "whole" / "data_report.json").read_text(encoding="utf-8"))
    assert 0 < account["train"]["read"] <= 60
    expected = weights(tmp_path / "whole")
    Experiment(make_recipe(data, tmp_path / "cut", **fields | {"max_train_samples": None})).train()
    # As if it had been stopped after step 20, in the second or third pass over the pairs.
    for checkpoint in (tmp_path / "cut").glob("checkpoint-30"):
        shutil.rmtree(checkpoint)
    Experiment(make_recipe(data, tmp_path / "cut", **fields, resume_from_checkpoint="true")).train()
    for name, tensor in weights(tmp_path / "cut").items():
        assert torch.equal(tensor, expected[name]), name


def test_another_place_in_a_stream_or_among_batches_is_pointed_out(data, tmp_path, caplog):
    fields = {
        "max_tokens_per_batch": 200,
        "per_device_train_batch_size": None,
        "eval_strategy": "no",
        "test_file": None,
    }
    fields |= {"max_steps": 2, "save_steps": 1}
    for streaming in (
        {"streaming": "true", "pairs_in_buffer": 25, "max_source_length": 90, "max_target_length": 90},
        {},
    ):
        run = tmp_path / f"run{len(streaming)}"
        Experiment(make_recipe(data, run, **fields, **streaming)).train()
        changes = {"max_tokens_per_batch": 240} | ({"pairs_in_buffer": 30} if streaming else {})
        going_on = {**fields, **streaming, **changes, "max_steps": 3, "resume_from_checkpoint": "true"}
        Experiment(make_recipe(data, run, **going_on)).train()
        assert "same place in the data: before, it had" in caplog.text
        assert "max_tokens_per_batch 200, now 240" in caplog.text
        assert ("pairs_in_buffer 25, now 30" in caplog.text) is bool(streaming)
        caplog.clear()


@pytest.mark.parametrize("missing", ["max_tokens_per_batch", "max_steps"])
def test_streaming_needs_a_budget_and_an_end(data, tmp_path, missing):
    fields = {"streaming": "true", "max_tokens_per_batch": 200, "max_steps": 6, missing: None}
    with pytest.raises(ValueError, match=f"`streaming` must come with `{missing}`"):
        make_recipe(data, tmp_path / "run", **fields)


@pytest.mark.parametrize("objective", ["span_corruption", "ul2", "text_infilling"])
def test_plain_text_trains_by_a_denoising_objective(data, tmp_path, objective):
    fields = {"objective": objective, "train_text_file": "train.de", "validation_text_file": "validation.de"}
    fields |= {
        "train_file": None,
        "validation_file": None,
        "test_file": None,
        "max_source_length": 48,
        "num_sentinels": 60,
    }
    fields |= {"max_tokens_per_batch": 400, "max_target_length": 60, "save_strategy": "no"}
    experiment = Experiment(make_recipe(data, tmp_path / "run", **fields))
    assert experiment.train() == {}
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(losses) == 2 and losses[1] < losses[0]
    account = json.loads((tmp_path / "run" / "data_report.json").read_text(encoding="utf-8"))
    assert account["train"]["documents"] == 60
    tokenizers = TokenizerPair.from_pretrained(tmp_path / "run")
    assert ("<mask>" if objective == "text_infilling" else "<extra_id_0>") in tokenizers.source.get_vocab()


@pytest.mark.parametrize("objective", ["span_corruption", "ul2"])
def test_a_single_token_behind_the_last_block_of_text_stops_no_run(data, tmp_path, objective):
    fields = {"objective": objective, "train_text_file": "text.txt", "remainder": "keep", "tokenizer_kind": "byte"}
    fields |= {"train_file": None, "validation_file": None, "test_file": None, "vocab_size": None}
    fields |= {"max_source_length": 24, "max_target_length": 24}

    def report_of(characters):
        (data / "text.txt").write_text("a" * characters + "\n", encoding="utf-8")
        experiment = Experiment(make_recipe(data, tmp_path / "run", **fields))
        experiment.corpus.load()
        experiment.corpus.encode(experiment.make_tokenizers())
        return experiment.corpus.reports["train"]

    length = report_of(300).block_length
    report = report_of(3 * length)
    assert (report.remainder_tokens, report.blocks) == (1, 3)
    assert "1 tokens behind the last block not used" in str(report)


def test_fields_of_text_and_fields_of_pairs_exclude_each_other(data, tmp_path):
    with pytest.raises(ValueError, match="`objective` and `train_file` must not both be given"):
        make_recipe(data, tmp_path / "run", objective="ul2")
    with pytest.raises(ValueError, match="`train_text_file` must come with `objective`"):
        make_recipe(data, tmp_path / "run", train_text_file="train.de")


@pytest.mark.parametrize("choice", ["last", "best"])
def test_the_finished_model_is_the_mean_of_checkpoints(data, tmp_path, choice):
    fields = {f"average_{choice}": 2, "max_steps": 9, "metric_for_best_model": "loss", "learning_rate": 1e-2}
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert not (tmp_path / "run" / "average").exists()
    kept = [weights(tmp_path / "run" / f"checkpoint-{step}") for step in (6, 9)]
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, (kept[0][name] + kept[1][name]) / 2, msg=name)
        assert kept[0][name].ndim == 1 or not torch.equal(kept[0][name], kept[1][name])


@pytest.mark.parametrize("choice", ["last", "best"])
def test_a_run_that_went_back_is_averaged_without_what_it_left(data, tmp_path, choice):
    fields = {f"average_{choice}": 2, "metric_for_best_model": "loss", "learning_rate": 1e-2}
    Experiment(make_recipe(data, tmp_path / "run", **fields, max_steps=9)).train()
    left = weights(tmp_path / "run" / "checkpoint-9")
    fields["resume_from_checkpoint"] = tmp_path / "run" / "checkpoint-3"
    Experiment(make_recipe(data, tmp_path / "run", **fields, max_steps=6)).train()
    kept = [weights(tmp_path / "run" / f"checkpoint-{step}") for step in (3, 6)]
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, (kept[0][name] + kept[1][name]) / 2, msg=name)
    assert all(
        torch.equal(left[name], tensor)
        for name, tensor in weights(tmp_path / "run" / "_abandoned-1" / "checkpoint-9").items()
    )


def test_the_best_are_chosen_by_the_scores_of_this_run(data, tmp_path):
    (tmp_path / "run").mkdir()
    log = [{"step": step, "eval_loss": float(step)} for step in (3, 6, 9)]
    (tmp_path / "run" / "trainer_state.json").write_text(json.dumps({"global_step": 300, "log_history": log}))
    fields = {"average_best": 2, "max_steps": 9, "metric_for_best_model": "loss", "learning_rate": 1e-2}
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    kept = [weights(tmp_path / "run" / f"checkpoint-{step}") for step in (6, 9)]
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, (kept[0][name] + kept[1][name]) / 2, msg=name)


def test_averages_need_checkpoints_that_are_kept(data, tmp_path):
    with pytest.raises(ValueError, match="`average_last` must be at most `save_total_limit`, got 4 and 2"):
        make_recipe(data, tmp_path / "run", average_last=4, save_total_limit=2)
    for choice, field in (("last", "save_strategy"), ("best", "save_strategy"), ("best", "eval_strategy")):
        with pytest.raises(ValueError, match=f"`average_{choice}` must come with `{field}` .*, got no"):
            make_recipe(data, tmp_path / "run", **{f"average_{choice}": 2, field: "no"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"metrics": ["blue"]}, "A name in `metrics` must be one of bleu, .*, got 'blue'. Did you mean 'bleu'?"),
        ({"bleu_tokenize": "nosuch"}, "`bleu_tokenize` must be one of none, .*, got 'nosuch'"),
        (
            {"average_best": 2, "metrics": ["chrf"]},
            "one of loss, perplexity, chrf, got 'bleu', by which `average_best`",
        ),
        ({"average_best": 2, "predict_with_generate": "false"}, "one of loss, perplexity, got 'bleu', by which"),
        ({"metric_for_best_model": "eval_ter"}, "one of loss, perplexity, bleu, chrf, got 'eval_ter'."),
    ],
    ids=str,
)
def test_mistakes_in_scores_are_found_before_any_work(data, tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        Experiment(make_recipe(data, tmp_path / "run", **fields))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_bleu_that_is_not_installed_is_found_before_any_work(data, tmp_path, monkeypatch):
    # As it is where MeCab is missing; here it may be there.
    def fail(tokenize):
        raise RuntimeError("Japanese tokenization requires extra dependencies,\n but you do not have them installed.")

    monkeypatch.setattr(metrics.BLEU, "__init__", lambda self, tokenize: fail(tokenize))
    with pytest.raises(
        ValueError, match=r"`bleu_tokenize` must be installed, got 'ja-mecab': Japanese .* dependencies, but"
    ):
        Experiment(make_recipe(data, tmp_path / "run", bleu_tokenize="ja-mecab"))


@pytest.mark.parametrize(("steps", "kept"), [(7, [6, 7]), (3, [3])])
def test_a_run_too_short_for_its_average_is_not_lost(data, tmp_path, caplog, steps, kept):
    with caplog.at_level(logging.WARNING):
        Experiment(make_recipe(data, tmp_path / "run", average_last=3, max_steps=steps, save_steps=6)).train()
    assert f"The last 3 checkpoints were to be taken, but {tmp_path / 'run'} has only {len(kept)}" in caplog.text
    checkpoints = [weights(tmp_path / "run" / f"checkpoint-{step}") for step in kept]
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, sum(checkpoint[name] for checkpoint in checkpoints) / len(kept), msg=name)


@pytest.mark.parametrize("bf16", ["true", "false"])
def test_run_in_bfloat16_says_where_it_is_slow(data, tmp_path, monkeypatch, caplog, bf16):
    monkeypatch.setattr(precision, "speed_of_bfloat16", lambda: 0.5)
    with caplog.at_level(logging.WARNING):
        Experiment(make_recipe(data, tmp_path / "run", bf16=bf16, max_steps=1)).train()
    assert ("at 0.50 of its speed in float32" in caplog.text) is (bf16 == "true")


def test_techniques_of_training_act(data, tmp_path):
    plain = Experiment(make_recipe(data, tmp_path / "plain")).train()
    ways = {
        "average": {"exponential_average_decay": 0.5},
        "r_drop": {"r_drop_alpha": 3, "model.dropout": 0.2, "max_tokens_per_batch": 300},
        "late_r_drop": {"r_drop_alpha": 3, "r_drop_start_step": 1, "model.dropout": 0.2, "max_tokens_per_batch": 300},
        "factors": {"learning_rate_factors.encoder": 0.1},
        "decay": {"layer_decay": 0.5, "model.encoder_layers": 2},
    }
    for name, fields in ways.items():
        assert Experiment(make_recipe(data, tmp_path / name, **fields)).train()["loss"] != plain["loss"], name


def test_fine_tuning_adds_special_tokens(data, tmp_path):
    Experiment(make_recipe(data, tmp_path / "first", max_steps=1, save_steps=1, eval_steps=1)).train()
    fields = {"model_name_or_path": tmp_path / "first", "preset": None, "vocab_size": None, "max_steps": 1}
    fields |= {"additional_special_tokens": ["<2de>", "<2fr>"], "source_prefix": "<2de> "}
    Experiment(make_recipe(data, tmp_path / "second", save_steps=1, eval_steps=1, **fields)).train()
    first, second = (TokenizerPair.from_pretrained(tmp_path / name) for name in ("first", "second"))
    assert len(second.source) == len(first.source) + 2
    [ids] = second.encode_sources(["<2de> the cat"])
    assert ids[0] == second.source.convert_tokens_to_ids("<2de>") == len(first.source)
    assert second.decode_targets([ids]) == ["<2de> the cat"]
    assert weights(tmp_path / "second")["lm_head.weight"].shape[0] == len(second.source)


def test_r_drop_without_dropout_is_refused_before_training(data, tmp_path):
    recipe = make_recipe(data, tmp_path / "run", **{"r_drop_alpha": 3, "model.dropout": 0})
    with pytest.raises(ValueError, match="`r_drop_alpha` must come with a model whose dropout"):
        Experiment(recipe).train()


def test_frozen_parts_stay(data, tmp_path):
    Experiment(make_recipe(data, tmp_path / "first", max_steps=1, save_steps=1, eval_steps=1)).train()
    fields = {"freeze": ["encoder.layers", "decoder.layers.0"], "model_name_or_path": tmp_path / "first"}
    Experiment(make_recipe(data, tmp_path / "second", **fields | {"preset": None, "vocab_size": None})).train()
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("encoder.layers" in name or "decoder.layers.0" in name for name in changed)


def test_lora_trains_adapters_and_leaves_a_plain_model(data, tmp_path):
    pytest.importorskip("peft")
    Experiment(make_recipe(data, tmp_path / "base", max_steps=1, save_steps=1, eval_steps=1)).train()
    fields = {"model_name_or_path": tmp_path / "base", "preset": None, "vocab_size": None, "lora_rank": 4}
    fields |= {"learning_rate": 1e-2, "lora_target_modules": ["q_proj", "v_proj"]}
    result = Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert result["num_examples"] == 8
    before, after = weights(tmp_path / "base"), weights(tmp_path / "run")
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "v_proj"}
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "run" / "adapter_model.safetensors").exists()


def test_no_token_of_the_hub_lies_in_a_checkpoint(data, tmp_path):
    fields = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "test_file": None, "validation_file": None}
    Experiment(make_recipe(data, tmp_path / "run", **fields, hub_token="hf_verysecret")).train()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    assert not any(b"hf_verysecret" in path.read_bytes() for path in files)


def test_targets_without_an_end_are_told_when_they_are_scored(data, tmp_path, caplog):
    fields = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no", "generation_max_length": 2}
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    assert "8 of 8 targets met the length limit, 2 tokens, before their end" in caplog.text

import json

import datasets
import pytest
import torch
from small_experiments import ONE_STEP, make_recipe, read_log, train
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainingArguments
from transformers.trainer_pt_utils import safe_globals

from metaphrase.inference import Generator
from metaphrase.tokenization import TokenizerPair
from metaphrase.training import experiment
from metaphrase.training.experiment import Experiment
from metaphrase.training.recipe.recipe import load_recipe


def test_a_long_test_source_is_cut_and_not_an_error_at_the_end(data, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "MAX_TOKENS_WITHOUT_POSITIONS", 5)
    fields = {**ONE_STEP, "test_file": "test.tsv", "model.position_embedding_type": "relative"}
    assert train(data, tmp_path / "run", **fields)["num_truncated"] > 0


def test_a_recipe_becomes_a_folder_that_transformers_loads(data, tmp_path):
    output = tmp_path / "run"
    result = train(data, output, metrics=["bleu", "exact_match"])
    assert set(result["scores"]) == {"bleu", "exact_match"}
    assert result["scores"]["bleu"]["signature"].startswith("nrefs:1|")
    assert result["num_examples"] == 8
    assert json.loads((output / "metrics.json").read_text()) == result
    report = json.loads((output / "data_report.json").read_text())
    assert report["train"]["kept"] == 60
    evaluations = read_log(output, "eval_bleu")
    assert [entry["step"] for entry in evaluations] == [3, 6]
    assert all(entry["eval_loss"] > 0 and entry["eval_perplexity"] > 1 for entry in evaluations)
    assert load_recipe(output / "recipe.yaml").model["hidden_size"] == 16
    assert len((output / "test_predictions.txt").read_text(encoding="utf-8").splitlines()) == 8

    tokenizer, model = AutoTokenizer.from_pretrained(output), AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.generation_config.max_length == 12
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    texts = ["The cat is black.", "He sleeps."]
    outputs = model.generate(**tokenizer(texts, return_tensors="pt", padding=True))
    expected = Generator.from_pretrained(output).generate(texts)
    assert tokenizer.batch_decode(outputs, skip_special_tokens=True) == expected


def test_separate_vocabularies(data, tmp_path):
    recipe = make_recipe(data, tmp_path / "run", vocab_size=400, target_tokenizer_kind="word", target_vocab_size=500)
    Experiment(recipe).train()
    pair = TokenizerPair.from_pretrained(tmp_path / "run")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert not pair.is_joint and pair.target.backend_tokenizer.model.ignore_merges
    assert model.model.encoder.embed_tokens.weight.shape[0] == len(pair.source)
    assert model.lm_head.weight.shape[0] == len(pair.target)
    assert len(pair.source) != len(pair.target)
    assert len(Generator.from_pretrained(tmp_path / "run").generate(["He sleeps."])) == 1


def test_pretokenized_text_is_scored_joined(data, tmp_path, monkeypatch):
    path = data / "test.tsv"
    path.write_text(path.read_text(encoding="utf-8").replace("er ", "@@ er "), encoding="utf-8")
    fields = {"tokenizer_kind": "pretokenized", "vocab_size": None, "bleu_tokenize": "none"}
    joined, as_decoded = [], TokenizerPair.as_decoded
    monkeypatch.setattr(
        TokenizerPair, "as_decoded", lambda self, texts: joined.append(as_decoded(self, texts)) or joined[-1]
    )
    result = train(data, tmp_path / "run", **fields)
    assert "tok:none" in result["scores"]["bleu"]["signature"]
    assert joined and not any("@@" in text for texts in joined for text in texts)


def test_task_prefix_reaches_the_model_but_not_the_vocabulary(data, tmp_path):
    experiment = Experiment(make_recipe(data, tmp_path / "run", source_prefix="zzqzz: ", vocab_size=400))
    tokenizers = experiment.prepare().tokenizers
    assert all(source.startswith("zzqzz: ") for source in experiment.corpus.splits["train"]["source"])
    assert not any("zz" in token for token in tokenizers.source.get_vocab())


def test_pairs_with_an_empty_side_are_scored_but_not_trained_on_and_counted_so(data, tmp_path):
    files = {"train_file": "some.tsv", "validation_file": "few.tsv", "test_file": None}
    fields = {**files, "max_steps": 2, "eval_steps": 2}
    (data / "some.tsv").write_text("the cat\tdie Katze\n\tein Hund\na dog\t \na dog\tein Hund\n", encoding="utf-8")
    (data / "few.tsv").write_text("the dog\tder Hund\n \teine Katze\na cat\t\n", encoding="utf-8")
    result = train(data, tmp_path / "run", save_strategy="no", **fields)
    assert result["data"].items() >= {"num_train": 2, "num_validation": 3}.items() and result["num_examples"] == 3
    report = json.loads((tmp_path / "run" / "data_report.json").read_text(encoding="utf-8"))
    assert [(report[split]["kept"], report[split]["dropped"]) for split in ("train", "validation")] == [(2, 2), (3, 0)]
    evaluated = read_log(tmp_path / "run")[0]
    assert evaluated["eval_loss"] == pytest.approx(result["loss"], rel=1e-4)
    assert evaluated["eval_chrf"] == pytest.approx(result["scores"]["chrf"]["score"])
    with pytest.raises(ValueError, match="Neither side of a pair may be empty"):
        train(data, tmp_path / "other", **fields | {"train_file": "train.tsv"}, empty="error")


def test_a_run_reads_no_column_row_by_row(data, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.arrow_dataset.Column, "__iter__", None)
    fields = {"train_sampling_strategy": "group_by_length", "length_column_name": "source_length"}
    fields |= {"validation_file": None, "test_file": None, "num_validation": 5, "num_test": 4}
    result = train(data, tmp_path / "run", **fields, max_steps=1, eval_steps=1, save_steps=1)
    assert (result["num_examples"], result["data"]["num_train"]) == (4, 51), "others are taken out of train"


@pytest.mark.parametrize("field", [{"predict_with_generate": "false"}, {"prediction_loss_only": "true"}])
def test_the_finished_model_alone_can_be_decoded_and_scored(field, data, tmp_path):
    # A rate of no words is none, and nobody asks for it.
    (data / "few.tsv").write_text("the dog\t\na cat\t\n", encoding="utf-8")
    fields = {"metrics": ["wer"], "max_steps": 2, "eval_steps": 1, "validation_file": "few.tsv", **field}
    result = train(data, tmp_path / "run", **fields)
    assert list(result["scores"]) == ["wer"]
    assert len(read_log(tmp_path / "run")) == 2 and not read_log(tmp_path / "run", "eval_wer")


def test_several_gpus_need_a_process_each(data, tmp_path, monkeypatch):
    experiment = Experiment(make_recipe(data, tmp_path / "run"))
    monkeypatch.setattr(Seq2SeqTrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"one process with 2 GPUs. .*torchrun --nproc_per_node 2 .*accelerate"):
        experiment.train()
    assert not (tmp_path / "run").exists()


def test_r_drop_acts_from_its_first_step_on(data, tmp_path):
    fields = ONE_STEP | {"max_steps": 2, "model.dropout": 0.2, "max_tokens_per_batch": 300}
    starts = {"never": {}, "late": {"r_drop_alpha": 3, "r_drop_start_step": 1}, "always": {"r_drop_alpha": 3}}
    for name, start in starts.items():
        train(data, tmp_path / name, **fields | start)
    losses = {name: [entry["loss"] for entry in read_log(tmp_path / name, "loss")] for name in starts}
    assert losses["late"][0] == losses["never"][0] != losses["always"][0]
    assert losses["late"][1] != losses["never"][1]
    with pytest.raises(ValueError, match="`r_drop_alpha` must come with a model whose dropout"):
        train(data, tmp_path / "refused", **{"r_drop_alpha": 3, "model.dropout": 0})


def test_a_run_holds_no_token_of_the_hub_and_no_file_that_could_run_code(data, tmp_path):
    train(data, tmp_path / "run", **ONE_STEP, hub_token="hf_verysecret")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    [checkpoint] = (tmp_path / "run").glob("checkpoint-*")
    for folder in (checkpoint.parent, checkpoint):
        assert json.loads((folder / "training_args.json").read_text())["max_steps"] == 1
    pickles = [path for path in files if path.suffix in (".bin", ".pkl", ".pt", ".pth")]
    assert set(pickles) == {checkpoint / name for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")}
    for path in pickles:
        # A Trainer loads them in this way.
        with safe_globals():
            torch.load(path, weights_only=True)
    assert not any(b"hf_verysecret" in path.read_bytes() for path in files)


LOGGED = {"train/loss", "train/learning_rate", "eval/loss", "eval/exact_match"}


def test_tensorboard_gets_all_of_a_resumed_run_without_set_up(data, trained):
    pytest.importorskip("tensorboardX", reason="The writer of TensorBoard's files is not installed.")
    fields = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "validation_file": "validation.tsv"}
    fields |= {"max_decoded_samples": 2, "metrics": ["exact_match"], "resume_from_checkpoint": "true"}
    train(data, trained, **ONE_STEP | fields, report_to="tensorboard")
    [events] = [path.read_bytes() for path in trained.rglob("events.out.tfevents.*")]
    assert all(name.encode() in events for name in LOGGED)

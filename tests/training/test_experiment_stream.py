import json
import shutil

import pytest
import torch
from small_experiments import make_recipe, weights
from tiny_generator import save_generator, tiny_generator

from metaphrase.augmentation.denoising import DEFAULT_SENTINELS
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.experiment import Experiment

STREAM = {"streaming": "true", "max_tokens_per_batch": 200, "pairs_in_buffer": 25, "per_device_train_batch_size": None}
STREAM |= {"max_source_length": 90, "max_target_length": 90}


def test_streamed_training_resumes_to_the_weights_of_one_that_did_not_stop(data, tmp_path):
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

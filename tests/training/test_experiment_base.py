import json
import math
from pathlib import Path

import pytest
import torch
from other_families import other_model
from safetensors.torch import load_file
from small_experiments import make_recipe, weights
from subcommands import execute
from tiny_generator import save_generator, tiny_generator, tiny_pair
from transformers import AutoModelForSeq2SeqLM

from metaphrase.conversion import convert
from metaphrase.inference import Generator
from metaphrase.scripts import train
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.experiment import Experiment

FINE = {"preset": None, "vocab_size": None}
SHORT = FINE | {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}


@pytest.fixture
def base(tmp_path):
    return save_generator(tiny_generator(kind="byte", layers=1), tmp_path / "base")


@pytest.mark.parametrize("family", ["fsmt", "marian", "t5"])
def test_other_families_are_fine_tuned(family, data, tmp_path):
    base = tmp_path / "base"
    other_model(family).save_pretrained(base)
    tiny_pair().save_pretrained(base)
    # FSMT lengthens its table of positions for what is longer, and cannot be loaded with that.
    (data / "short.tsv").write_text("a cat\tein Hund\n", encoding="utf-8")
    fields = FINE | {"max_steps": 2, "model_name_or_path": base, "num_beams": 2}
    fields |= {"max_source_length": 60, "max_target_length": 60}
    fields |= {"validation_file": "short.tsv", "test_file": "short.tsv"}
    result = Experiment(make_recipe(data, tmp_path / "run", save_strategy="no", **fields)).train()
    assert math.isfinite(result["loss"]) and result["num_examples"] == 1
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in (base, tmp_path / "run"))
    assert type(after) is type(before)
    assert any(not torch.equal(weight, after.state_dict()[name]) for name, weight in before.state_dict().items())


def test_fine_tuning_adds_special_tokens(base, data, tmp_path):
    fields = SHORT | {"additional_special_tokens": ["<2de>", "<2fr>"], "source_prefix": "<2de> "}
    Experiment(make_recipe(data, tmp_path / "run", **fields, model_name_or_path=base)).train()
    first, second = (TokenizerPair.from_pretrained(folder) for folder in (base, tmp_path / "run"))
    assert len(second.source) == len(first.source) + 2
    [ids] = second.encode_sources(["<2de> the cat"])
    assert ids[0] == second.source.convert_tokens_to_ids("<2de>") == len(first.source)
    assert second.decode_targets([ids]) == ["<2de> the cat"]
    assert weights(tmp_path / "run")["lm_head.weight"].shape[0] == len(second.source)


def test_parts_may_be_frozen_for_the_first_updates(base, data, tmp_path):
    fields = SHORT | {"freeze": ["*", "!*.cross_attn*"], "freeze_steps": 2, "model_name_or_path": base}
    fields |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "weight_decay": 0.1}
    fields |= {"lr_scheduler_type": "constant"}
    Experiment(make_recipe(data, tmp_path / "run", **fields)).train()
    before, middle, after = map(weights, (base, tmp_path / "run/checkpoint-2", tmp_path / "run"))
    early, late = (
        {name for name in before if not torch.equal(first[name], second[name])}
        for first, second in ((before, middle), (middle, after))
    )
    assert early == {name for name in before if ".cross_attn" in name} and late == before.keys()
    # Resumed between the updates, the run ends with the same weights.
    recipe = make_recipe(data, tmp_path / "again", **fields | {"max_steps": 1, "save_steps": 1})
    Experiment(recipe).train()
    recipe = make_recipe(data, tmp_path / "again", **fields | {"resume_from_checkpoint": "true"})
    Experiment(recipe).train()
    resumed = weights(tmp_path / "again")
    assert all(torch.equal(after[name], resumed[name]) for name in after)


RECIPES = Path(train.__file__).parent / "recipes"


@pytest.mark.parametrize(("name", "rank"), [("t5", None), ("marian", 4)])
def test_converted_model_is_fine_tuned_by_its_recipe(name, rank, data, tmp_path):
    theirs = other_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    tiny_pair().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    words = ["--data_dir", str(data), "--output_dir", str(tmp_path / "run"), "--model_name_or_path"]
    words += [str(tmp_path / "ours"), "--max_steps", "2", "--save_strategy", "no", "--eval_strategy", "no"]
    words += ["--load_best_model_at_end", "false", "--use_cpu", "--disable_tqdm", "--warmup_steps", "1"]
    words += ["--max_source_length", "60", "--max_target_length", "60", "--too_long", "truncate"]
    words += ["--generation_max_length", "12"]
    if rank is not None:
        words += ["--lora_rank", str(rank), "--optim", "adamw_torch", "--lora_target_modules", "v_proj"]
    execute(train, [str(RECIPES / f"finetune_{name}.yaml"), *words])

    run = tmp_path / "run"
    assert json.loads((run / "metrics.json").read_text(encoding="utf-8"))["scores"].keys() >= {"bleu", "chrf"}
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "ours", run))
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert "model.encoder.embed_tokens.weight" in moved or {key.split(".")[-2] for key in moved} == {"v_proj"}
    assert "model.decoder.layers.0.cross_attn.v_proj.weight" in moved
    assert (run / "adapter" / "adapter_model.safetensors").is_file() is (rank is not None)
    assert len(Generator.from_pretrained(run).generate(["The cat is black."])) == 1
    # A fine-tuned model can be converted back to the class of its family.
    convert(run, tmp_path / "again", to=name)
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")) is type(theirs)

import json
from pathlib import Path

import pytest
import torch
from other_families import other_model
from safetensors.torch import load_file
from subcommands import execute
from tiny_generator import tiny_pair
from transformers import AutoModelForSeq2SeqLM

from metaphrase.conversion import convert
from metaphrase.inference import Generator
from metaphrase.scripts import train

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
        words += ["--lora_rank", str(rank), "--optim", "adamw_torch"]
    execute(train, [str(RECIPES / f"finetune_{name}.yaml"), *words])

    run = tmp_path / "run"
    assert json.loads((run / "metrics.json").read_text(encoding="utf-8"))["scores"].keys() >= {"bleu", "chrf"}
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "ours", run))
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    # An adapter leaves embeddings and norms as they are.
    assert ("model.encoder.embed_tokens.weight" in moved) is (rank is None)
    assert "model.decoder.layers.0.cross_attn.v_proj.weight" in moved
    assert (run / "adapter").is_dir() is (rank is not None)
    assert len(Generator.from_pretrained(run).generate(["The cat is black."])) == 1
    # A fine-tuned model can be converted back to the class of its family.
    convert(run, tmp_path / "again", to=name)
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")) is type(theirs)

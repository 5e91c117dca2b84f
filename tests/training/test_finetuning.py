"""The recipes that fine-tune converted models, on tiny ones of random weights, with and without an adapter."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration
from verbs import execute

from metaphrase.conversion import convert
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.inference import Generator
from metaphrase.scripts import train
from metaphrase.tokenization import TokenizerPair

RECIPES = Path(train.__file__).parent / "recipes"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split, pairs in make_demo_corpus(num_train=2000, num_validation=6, num_test=6).items():
        text = "".join(f"{source}\t{target}\n" for source, target in pairs[:40])
        (folder / f"{split}.tsv").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizers(data):
    lines = [line.split("\t") for line in (data / "train.tsv").read_text(encoding="utf-8").splitlines()]
    return TokenizerPair.train(*zip(*lines, strict=True), vocab_size=600, show_progress=False)


def tiny_t5(fields):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, **fields))


def tiny_marian(fields):
    sizes = {f"{stack}_{kind}": 1 for stack in ("encoder", "decoder") for kind in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    return MarianMTModel(MarianConfig(**sizes, **fields))


@pytest.mark.parametrize(("name", "make", "rank"), [("t5", tiny_t5, None), ("marian", tiny_marian, 4)])
def test_converted_model_is_fine_tuned_by_its_recipe(name, make, rank, data, tokenizers, tmp_path):
    ids = {field: value for field, value in tokenizers.config_fields().items() if field != "decoder_vocab_size"}
    ids["decoder_start_token_id"] = ids["pad_token_id"]
    theirs = make(ids)
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizers.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    words = ["--data_dir", str(data), "--output_dir", str(tmp_path / "run"), "--model_name_or_path"]
    words += [str(tmp_path / "ours"), "--max_steps", "2", "--save_strategy", "no", "--eval_strategy", "no"]
    words += ["--load_best_model_at_end", "false", "--use_cpu", "--disable_tqdm", "--warmup_steps", "1"]
    if rank is not None:
        words += ["--lora_rank", str(rank), "--optim", "adamw_torch"]
    execute(train, [str(RECIPES / f"finetune_{name}.yaml"), *words])

    run = tmp_path / "run"
    assert set(json.loads((run / "metrics.json").read_text(encoding="utf-8"))["scores"]) == {
        *("bleu", "chrf", "exact_match")
    }
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "ours", run))
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    # An adapter leaves embeddings and norms as they are.
    assert ("model.encoder.embed_tokens.weight" in moved) is (rank is None)
    assert "model.decoder.layers.0.cross_attn.v_proj.weight" in moved
    assert (run / "adapter").is_dir() is (rank is not None)
    assert len(Generator.from_pretrained(run).generate(["The cat is black."])) == 1
    # What was fine-tuned goes out again as the family's own class.
    convert(run, tmp_path / "again", to=name)
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")) is type(theirs)

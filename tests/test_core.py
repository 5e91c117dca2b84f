"""Test of the core alone: a copy without the rings trains, evaluates, generates, pushes, saves and loads."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
from hub_stand_in import StandIn
from source_files import FOLDERS, ROOT

PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
RINGS = re.findall(r"^\| (?:speed|choices|reach) \| `(\w+)` \|", PAGE, re.MULTILINE)
SUBCOMMANDS = ("train", "evaluate", "generate", "push")
# This number may fall, never grow.
MOST_LINES = 13_000
RECIPE = """
train_file: pairs.tsv
validation_file: pairs.tsv
test_file: pairs.tsv
preset: metaphrase-tiny
model: {hidden_size: 32, encoder_attention_heads: 2, decoder_attention_heads: 2, encoder_ffn_dim: 64, decoder_ffn_dim: 64}
tokenizer_kind: byte
max_steps: 6
eval_strategy: steps
eval_steps: 3
save_steps: 3
logging_steps: 1
learning_rate: 0.001
per_device_train_batch_size: 8
output_dir: run
use_cpu: true
"""
LOAD = """
import torch
import metaphrase
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained("run").eval()
tokenizer = AutoTokenizer.from_pretrained("run")
assert type(model).__module__ == "metaphrase.modeling.modeling_metaphrase"
assert type(model)._sample.__module__.startswith("transformers.")
model.save_pretrained("again"), tokenizer.save_pretrained("again")
batch = tokenizer(["a b c"], return_tensors="pt")
again = AutoModelForSeq2SeqLM.from_pretrained("again").eval()
outputs = [m.generate(**batch, num_beams=2, max_new_tokens=5) for m in (model, again)]
assert torch.equal(*outputs)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", *(RINGS if name == "metaphrase" else ()))
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    kept = {*SUBCOMMANDS, "__init__", "__main__"}
    for path in (folder / "scripts").glob("*.py"):
        if path.stem not in kept:
            path.unlink()
    # The options of the other subcommands.
    (folder / "scripts" / "parsers" / "rings.py").unlink()
    return folder


def run(core, folder, *words, **variables):
    environment = {**os.environ, "PYTHONPATH": str(core), "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_core_goes_from_pairs_to_a_shared_model(core, tmp_path):
    assert run(core, tmp_path, "-c", "import metaphrase; print(metaphrase.__file__)").startswith(str(core))
    said = run(core, tmp_path, "-m", "metaphrase", "--help")
    assert re.findall(r"^  (\w+) ", said, re.MULTILINE) == list(SUBCOMMANDS)
    sources = [" ".join("abcdef"[number % 6 :: 2]) + f" {number}" for number in range(24)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{source.upper()}\n" for source in sources))
    (tmp_path / "source.txt").write_text("\n".join(sources) + "\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run(core, tmp_path, "-m", "metaphrase", "train", "recipe.yaml")
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["scores"]
    run(core, tmp_path, "-m", "metaphrase", "evaluate", "run", "--file", "pairs.tsv")
    options = ("--input", "source.txt", "--output", "target.txt", "--max_new_tokens", "8")
    run(core, tmp_path, "-m", "metaphrase", "generate", "run", *options, "--num_beams", "2")
    assert (tmp_path / "target.txt").read_text().count("\n") == len(sources)
    run(core, tmp_path, "-c", LOAD)
    with StandIn() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        words = ("push", "run", "somebody/tiny", "--token", "hf_of_the_test")
        run(core, tmp_path, "-m", "metaphrase", *words, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
        assert {"model.safetensors", "README.md", "modeling_metaphrase.py"} <= {
            n for commit in hub.commits for n in commit[2]
        }
        hub.shutdown()


def test_core_can_be_read_in_an_afternoon(core):
    files = [path for name in FOLDERS for path in (core / name).rglob("*.py")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= MOST_LINES

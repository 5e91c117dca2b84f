import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_trainers import make_trainer, small_pairs
from subcommands import execute
from tiny_models import tiny_model
from transformers import AutoModelForSeq2SeqLM

from metaphrase.scripts.__main__ import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, scores = tmp_path_factory.mktemp("trained") / "run", iter([5.0, 9.0, 7.0])
    options = {"max_steps": 3, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    options |= {"learning_rate": 0.01, "generation_max_length": 6, "score": lambda *_: {"bleu": next(scores)}}
    make_trainer(tiny_model(vocab_size=60, initializer_range=0.2), small_pairs(), folder, **options).train()
    return folder


def test_command_averages_checkpoints_of_a_run(trained, tmp_path):
    checkpoints = {step: load_file(trained / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2, 3)}
    log = json.loads((trained / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    losses = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    for words, steps in (
        ([str(trained), "--last", "2"], (2, 3)),
        ([str(trained), "--best", "2"], (2, 3)),
        ([str(trained), "--best", "2", "--metric", "loss"], sorted(losses, key=losses.get)[:2]),
        ([str(trained / "checkpoint-1"), str(trained / "checkpoint-3")], (1, 3)),
    ):
        output = tmp_path / "-".join(Path(word).name for word in words)
        execute("average", [*words, "--output", str(output)])
        for name, weight in load_file(output / "model.safetensors").items():
            assert torch.equal(weight, (sum(checkpoints[step][name].double() for step in steps) / 2).float()), name
        AutoModelForSeq2SeqLM.from_pretrained(output)


def test_mistakes_of_the_command_are_one_line(trained, tmp_path, capsys):
    both = [str(trained / f"checkpoint-{step}") for step in (1, 2)]
    for words, message in (
        ([str(trained)], "Either `last` or `best` must be given"),
        ([*both, "--last", "2"], "`--last`, `--best` and `--metric` need one run, got 2 folders."),
        ([str(trained), "--last", "1"], "`folders` must be at least two, and different"),
        ([str(trained), "--last", "2", "--output", str(tmp_path)], "Pass --overwrite"),
    ):
        given = words if "--output" in words else [*words, "--output", str(tmp_path / "mean")]
        assert run("average", given) == 2
        said = capsys.readouterr().err
        assert said.startswith("metaphrase average: error: ") and message in said and said.count("\n") == 1

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_texts import contents
from safetensors.torch import load_file, save_file
from small_trainers import make_trainer, small_pairs
from subcommands import execute
from tiny_generator import tiny_pair
from tiny_models import tiny_model
from transformers import AutoModelForSeq2SeqLM

from metaphrase.scripts.__main__ import run as run_command
from metaphrase.techniques.averaging import average_checkpoints, select_checkpoints
from metaphrase.tokenization import TokenizerPair


def save_models(folder, count=3, dtype=torch.float32, max_shard_size="1GB", **fields):
    models = [tiny_model(seed=seed, **fields).to(dtype) for seed in range(count)]
    for index, model in enumerate(models):
        model.save_pretrained(folder / str(index), max_shard_size=max_shard_size)
    return models, [folder / str(index) for index in range(count)]


def save_tensors(folder, tensors, **config):
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "metaphrase", **config}))
    return folder


@pytest.mark.parametrize(("dtype", "max_shard_size"), [(torch.float32, "1GB"), (torch.bfloat16, "40KB")])
def test_mean_by_hand_in_the_type_and_the_files_of_the_checkpoints(dtype, max_shard_size, tmp_path):
    models, folders = save_models(tmp_path, dtype=dtype, max_shard_size=max_shard_size)
    output = average_checkpoints(folders, tmp_path / "mean")
    written = sorted(path.name for path in output.glob("*.safetensors*"))
    assert written == sorted(path.name for path in folders[-1].glob("*.safetensors*"))
    assert ("model.safetensors.index.json" in written) is (max_shard_size == "40KB")
    averaged = AutoModelForSeq2SeqLM.from_pretrained(output, dtype="auto")
    for name, tensor in averaged.state_dict().items():
        assert tensor.dtype == dtype
        mean = sum(model.state_dict()[name].double() for model in models) / len(models)
        assert torch.equal(tensor, mean.to(dtype)), name


def test_whole_numbers_are_those_of_the_last(tmp_path, caplog):
    first = save_tensors(tmp_path / "a", {"weight": torch.tensor([1.0, 2.0]), "steps": torch.tensor(7)})
    second = save_tensors(tmp_path / "b", {"weight": torch.tensor([3.0, 5.0]), "steps": torch.tensor(9)})
    averaged = load_file(average_checkpoints([first, second], tmp_path / "mean") / "model.safetensors")
    assert averaged["weight"].tolist() == [2.0, 3.5] and averaged["steps"].item() == 9
    assert f"Whole numbers that differ are those of {second}: steps." in caplog.text


def test_first_difference_is_named(tmp_path):
    weights = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    base = save_tensors(tmp_path / "base", weights, hidden_size=32, transformers_version="5.1", _name_or_path="x")
    same = save_tensors(tmp_path / "same", weights, hidden_size=32, transformers_version="5.2")
    average_checkpoints([base, same], tmp_path / "mean")
    others = {
        "config": (weights, 64, "`hidden_size` of config.json .*got 32 and 64"),
        "name": ({**weights, "c": torch.zeros(1)}, 32, "`c` of the weights"),
        "type": ({**weights, "b": torch.zeros(4).half()}, 32, "`b` of the weights"),
    }
    for name, (tensors, hidden_size, difference) in others.items():
        other = save_tensors(tmp_path / name, tensors, hidden_size=hidden_size)
        with pytest.raises(ValueError, match=difference):
            average_checkpoints([base, other], tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_weights_for_other_tokens_are_not_averaged(tmp_path):
    pair = copy.deepcopy(tiny_pair(False))
    folders = [save_tensors(tmp_path / name, {"a": torch.zeros(2)}, hidden_size=2) for name in ("one", "two")]
    for folder in folders:
        # Settings are of no matter.
        pair.target.model_max_length += 1
        pair.save_pretrained(folder)
    average_checkpoints(folders, tmp_path / "mean")
    pair.target.add_tokens(["<new>"])
    pair.save_pretrained(folders[1])
    with pytest.raises(ValueError, match=r"target vocabulary must be the same in .*one and in .*two"):
        average_checkpoints(folders, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_what_is_no_whole_checkpoint_is_refused(tmp_path):
    names = ("good", "adapter", "short")
    good, adapter, short = (save_tensors(tmp_path / name, {"a": torch.zeros(2)}) for name in names)
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    (short / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-1])
    for folder, message in (
        (good, "`folders` must be at least two, and different, got"),
        (tmp_path / "none", "must hold model.safetensors or .*, got neither in .*none"),
        (adapter, "must hold whole weights, got an adapter in .*: merge it first"),
        (short, "must hold whole weights, got .*short"),
    ):
        with pytest.raises(ValueError, match=message):
            average_checkpoints([good, folder], tmp_path / "output")


def test_all_else_that_belongs_to_the_model_comes_from_the_last(tmp_path):
    pair = tiny_pair(False)
    left = ("optimizer.pt", "progress.json", "trainer_state.json", "training_args.bin", "training_args.json")
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        model = tiny_model(seed=step, share_embeddings=False, **pair.config_fields())
        model.generation_config.max_length = 10 * step
        model.save_pretrained(folder)
        pair.save_pretrained(folder)
        (folder / "modeling_own.py").write_text(f"STEP = {step}\n")
        for name in left:
            (folder / name).write_bytes(b"{}")
        (folder / "runs").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("preset: metaphrase-tiny\n")
    folders = [tmp_path / "run" / f"checkpoint-{step}" for step in (1, 2)]
    output = average_checkpoints(folders, tmp_path / "run" / "mean")
    texts = ["a small dog", "the cat"]
    assert TokenizerPair.from_pretrained(output).encode_targets(texts) == pair.encode_targets(texts)
    assert not TokenizerPair.from_pretrained(output).is_joint
    assert AutoModelForSeq2SeqLM.from_pretrained(output).generation_config.max_length == 20
    assert (output / "modeling_own.py").read_text() == "STEP = 2\n"
    assert (output / "recipe.yaml").read_text() == "preset: metaphrase-tiny\n"
    provenance = json.loads((output / "average.json").read_text())
    assert provenance["averaged"] == ["run/checkpoint-1", "run/checkpoint-2"]
    assert {"average.json", *provenance["files"]} == contents(output).keys()
    assert not any((output / name).exists() for name in (*left, "runs"))


def test_only_an_average_is_replaced_and_only_when_told(tmp_path):
    _, folders = save_models(tmp_path / "models")
    output = average_checkpoints(folders[:2], tmp_path / "out" / "mean")
    first = (output / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="`output` must not exist"):
        average_checkpoints(folders[1:], output)
    average_checkpoints(folders[1:], output, overwrite=True)
    assert (output / "model.safetensors").read_bytes() != first
    own = tmp_path / "own" / "thesis.tex"
    own.parent.mkdir()
    own.write_text("years of work")
    for output, message in ((own.parent, r"hold .*average\.json"), (folders[0], "lie apart"), (tmp_path, "lie")):
        with pytest.raises(ValueError, match=f"`output` must {message}"):
            average_checkpoints(folders, output, overwrite=True)
    assert own.read_text() == "years of work"


def test_a_link_out_of_a_checkpoint_is_not_copied(tmp_path):
    _, folders = save_models(tmp_path / "models", count=2)
    (tmp_path / "key").write_text("private")
    (folders[1] / "LICENSE").symlink_to(tmp_path / "key")
    with pytest.raises(ValueError, match=r"`folders` must hold no link .*LICENSE -> .*key"):
        average_checkpoints(folders, tmp_path / "mean")


def make_run(folder, scores, steps=None):
    for step in steps or scores:
        (folder / f"checkpoint-{step}").mkdir(parents=True)
    log = [{"step": step, "loss": 1.0} for step in scores]
    log += [{"step": step, "eval_bleu": score, "eval_valid_ter": score} for step, score in scores.items()]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": max(scores), "log_history": log}))
    return folder


def steps(folders):
    return [int(folder.name.removeprefix("checkpoint-")) for folder in folders]


def test_checkpoints_are_selected_among_those_that_exist(tmp_path):
    scores = {10: 5.0, 20: 30.0, 30: 20.0, 40: 25.0, 50: 20.0, 60: float("nan"), 100: float("nan")}
    run = make_run(tmp_path, scores, steps=[10, 30, 40, 50, 60, 100])
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-200").write_text("no folder")
    assert steps(select_checkpoints(run, last=3)) == [50, 60, 100]
    # The best one last; of equals the later one is better.
    assert steps(select_checkpoints(run, best=2)) == [50, 40]
    assert steps(select_checkpoints(run, best=3, metric="bleu")) == [30, 50, 40]
    assert steps(select_checkpoints(run, best=2, metric="eval_valid_ter")) == [50, 10]
    assert steps(select_checkpoints(run, best=5, or_fewer=True)) == [10, 30, 50, 40]


def test_scores_are_those_of_the_latest_state(tmp_path):
    run = make_run(tmp_path, {1: 3.0, 2: 1.0})
    shutil.move(run / "trainer_state.json", run / "checkpoint-2" / "trainer_state.json")
    assert steps(select_checkpoints(run, best=1)) == [1]
    make_run(tmp_path / "older", {1: 9.0})
    shutil.move(tmp_path / "older" / "trainer_state.json", run / "trainer_state.json")
    assert steps(select_checkpoints(run, best=2)) == [2, 1]


@pytest.mark.parametrize(
    ("options", "field"),
    [({}, "last"), ({"last": 1, "best": 1}, "last"), ({"last": 3}, "last"), ({"best": 1, "metric": "rouge"}, "best")],
)
def test_what_cannot_be_chosen_is_refused(options, field, tmp_path):
    run = make_run(tmp_path / "run", {1: 3.0, 2: 1.0})
    with pytest.raises(ValueError, match=f"`{field}`"):
        select_checkpoints(run, **options)


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
        assert run_command("average", given) == 2
        said = capsys.readouterr().err
        assert said.startswith("metaphrase average: error: ") and message in said and said.count("\n") == 1

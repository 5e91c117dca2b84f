"""Which checkpoints are whole, and what is said of the others."""

import json
import os
import shutil

import pytest
import torch
from small_runs import is_whole, read
from tiny_models import tiny_model

from metaphrase.training.checkpointing.folders import last_whole_checkpoint, what_is_missing

PLAIN = ("model.safetensors", "trainer_state.json")
WHOLE = (*PLAIN, "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.json", "progress.json")


@pytest.mark.parametrize(("kind", "name"), [("plain", name) for name in PLAIN] + [("whole", name) for name in WHOLE])
def test_a_checkpoint_without_all_of_a_file_is_not_whole(kind, name, runs, tmp_path):
    run = shutil.copytree(runs[kind], tmp_path / "run")
    path = run / "checkpoint-3" / name
    content = path.read_bytes()
    assert is_whole(path.parent)
    # Without its last byte, JSON lacks a line feed alone.
    for size in (0, len(content) // 2, len(content) - 1 - name.endswith(".json")):
        path.write_bytes(content[:size])
        assert any(name in problem for problem in what_is_missing(path.parent)), size
    path.unlink()
    if name == "progress.json":
        # Then it is as of a plain Trainer.
        assert is_whole(path.parent)
        return
    expected = "the weights are missing" if (kind, name) == ("plain", "model.safetensors") else f"{name} is missing"
    assert what_is_missing(path.parent) == [expected]
    assert last_whole_checkpoint(run) == str(run / "checkpoint-2")


def test_files_of_another_size_or_without_a_list_are_named(run):
    extended = run / "checkpoint-3" / "rng_state.pth"
    shutil.copy(run / "checkpoint-3" / "optimizer.pt", extended)
    assert any(problem.startswith("rng_state.pth has") for problem in what_is_missing(extended.parent))
    # Of a tokenizer, for instance: its own loader would tell much later, or not at all.
    listed = read(run / "checkpoint-1" / "progress.json")
    (run / "checkpoint-1" / "spiece.model").write_bytes(b"1234")
    listed["files"]["spiece.model"] = 5
    (run / "checkpoint-1" / "progress.json").write_text(json.dumps(listed))
    assert what_is_missing(run / "checkpoint-1") == ["spiece.model has 4 bytes in place of 5"]
    (run / "checkpoint-2" / "progress.json").write_text("{}")
    assert what_is_missing(run / "checkpoint-2") == ["progress.json is cut short or damaged"]


def test_settings_may_be_edited_and_files_added(run):
    settings = run / "checkpoint-3" / "generation_config.json"
    settings.write_text(json.dumps({**read(settings), "num_beams": 4}))
    (run / "checkpoint-3" / "notes.txt").write_text("the best so far")
    assert is_whole(run / "checkpoint-3")


def test_shards_are_looked_for(plain_run):
    folder = plain_run / "checkpoint-3"
    (folder / "model.safetensors").unlink()
    tiny_model().save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2 and is_whole(folder)
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    assert what_is_missing(folder) == [f"{shards[1].name} is cut short or damaged"]
    shards[1].unlink()
    assert what_is_missing(folder) == [f"model.safetensors.index.json names {shards[1].name}, which is missing"]


def test_formats_of_sharded_training(plain_run):
    fsdp, deepspeed = plain_run / "checkpoint-3", plain_run / "checkpoint-2"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        (fsdp / part).mkdir()
        (fsdp / part / "__0_0.distcp").write_bytes(b"weights")
        (fsdp / part / ".metadata").write_bytes(b"where they are")
    for name in ("model.safetensors", "optimizer.pt"):
        (fsdp / name).unlink()
    states = deepspeed / "global_step2" / "mp_rank_00_model_states.pt"
    states.parent.mkdir()
    torch.save({"step": 2}, states)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        (deepspeed / name).unlink()
    assert is_whole(fsdp) and is_whole(deepspeed)
    (fsdp / "optimizer_0" / ".metadata").unlink()
    os.truncate(states, 50)
    assert not is_whole(fsdp) and not is_whole(deepspeed)


def test_what_is_not_whole_is_named_and_passed_over(run, caplog, tmp_path):
    os.truncate(run / "checkpoint-3" / "optimizer.pt", 100)
    (run / "checkpoint-2" / "model.safetensors").unlink()
    assert last_whole_checkpoint(run) == str(run / "checkpoint-1")
    assert "checkpoint-3 is not whole and is passed over: optimizer.pt is cut short or damaged" in caplog.text
    assert "checkpoint-2 is not whole and is passed over: model.safetensors is missing" in caplog.text
    shutil.rmtree(run / "checkpoint-1")
    assert last_whole_checkpoint(run) is None
    assert last_whole_checkpoint(tmp_path / "nowhere") is None
    assert what_is_missing(tmp_path / "nowhere") == ["there is no such folder"]

"""Tests of write locks: one run at a time writes an output, and a killed run holds no lock."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_experiments import make_recipe
from tiny_generator import SOURCES, save_generator, tiny_generator
from verbs import execute

from metaphrase.inference.line_files import NewFile, ResumedFile
from metaphrase.scripts import generate
from metaphrase.storage import folders
from metaphrase.storage.folders import WriteLock
from metaphrase.training.experiment import Experiment

HOLD = """
import sys, time
from metaphrase.storage.folders import WriteLock
with WriteLock(sys.argv[1], "output"):
    print("held", flush=True)
    time.sleep(600)
"""
REFUSAL = r"`output` must be written by one run at a time, got .*, which another one is writing\.$"


@pytest.fixture(params=["file", "folder"])
def place(request, tmp_path):
    path = tmp_path / "place"
    path.touch() if request.param == "file" else path.mkdir()
    return path


def test_a_second_run_is_refused_until_the_first_has_ended(place):
    with WriteLock(place, "output") as lock:
        with pytest.raises(ValueError, match=REFUSAL):
            WriteLock(place, "output")
        lock.release()
        WriteLock(place, "output").release()
    with WriteLock(place, "output"):
        # What was released does not let go of what others took since.
        lock.release()
        with pytest.raises(ValueError, match=REFUSAL):
            WriteLock(place, "output")


def test_a_process_that_is_killed_holds_nothing(place):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=REFUSAL):
            WriteLock(place, "output")
        process.kill()
    WriteLock(place, "output").release()


def test_a_process_that_was_forked_holds_nothing(place):
    lock = WriteLock(place, "output")
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        # The fork has let go of nothing that its parent holds.
        with pytest.raises(ValueError, match=REFUSAL):
            WriteLock(place, "output")
        lock.release()
        for _ in range(100):
            try:
                WriteLock(place, "output").release()
                break
            except ValueError:
                # It has not come to run yet.
                time.sleep(0.1)
        else:
            pytest.fail("The child holds the lock.")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_without_locks_nothing_is_locked(place, monkeypatch):
    def fail(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    with monkeypatch.context() as patch:
        patch.setattr(folders.fcntl, "flock", fail)
        with WriteLock(place, "output"), WriteLock(place, "output"):
            pass
    # The second one is refused as soon as there are locks.
    with WriteLock(place, "output"), pytest.raises(ValueError, match=REFUSAL):
        WriteLock(place, "output")
    monkeypatch.setattr(folders, "fcntl", None)
    with WriteLock(place, "output") as first, WriteLock(place, "output") as second:
        assert first is not second


def test_devices_may_be_written_by_many():
    with NewFile(os.devnull) as first, NewFile(os.devnull) as second:
        first.write("one\n")
        second.write("two\n")
    # What is written elsewhere first and then put in place would have made a file of it.
    assert Path(os.devnull).is_char_device() and Path(os.devnull).read_bytes() == b""


@pytest.mark.parametrize("resume", [False, True])
def test_an_output_that_is_being_written_is_left_alone(resume, tmp_path):
    model = str(save_generator(tiny_generator(kind="byte"), tmp_path / "model"))
    (tmp_path / "in").write_text("".join(line + "\n" for line in SOURCES), encoding="utf-8")
    words = [model, "--device", "cpu", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    words += ["--resume" if resume else "--overwrite"]
    options = {"num_targets": 1, "with_scores": False, "chunk_size": 5}
    with NewFile(tmp_path / "out") if not resume else ResumedFile(tmp_path / "out", **options) as first:
        first.write("a line\n")
        with pytest.raises(ValueError, match=REFUSAL):
            execute(generate, words)
        assert (tmp_path / "out").read_text("utf-8") == "a line\n"
    (tmp_path / "out").unlink()
    execute(generate, words)
    assert len((tmp_path / "out").read_text("utf-8").splitlines()) == len(SOURCES)


def test_a_folder_that_a_training_writes_to_is_left_alone(data, tmp_path):
    fields = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 1, "test_file": None, "validation_file": None}
    run = tmp_path / "run"
    # Both begin before anything is there.
    experiment, second = (Experiment(make_recipe(data, run, **fields)) for _ in range(2))
    refused = []

    def begin_another():
        tokenizers = type(experiment).make_tokenizers(experiment)
        with pytest.raises(ValueError, match=r"`output_dir` must be written by one run at a time, got .*run, which"):
            second.train()
        refused.append(sorted(path.name for path in run.iterdir()))
        return tokenizers

    experiment.make_tokenizers = begin_another
    experiment.train()
    assert refused == [[]] and (run / "model.safetensors").is_file()


def test_a_run_that_fails_before_it_writes_leaves_no_folder(data, tmp_path):
    experiment = Experiment(make_recipe(data, tmp_path / "run", max_tokens_per_batch=5))
    with pytest.raises(ValueError, match="must hold the longest pair"):
        experiment.train()
    assert not (tmp_path / "run").exists()

"""Tests of outputs in one step, complete or absent whoever is killed, and of locks against a second writer."""

import contextlib
import errno
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from small_experiments import make_recipe
from subcommands import execute
from tiny_generator import SOURCES

from metaphrase.inference.line_files import OutputFile
from metaphrase.scripts import generate
from metaphrase.scripts.__main__ import run
from metaphrase.storage import folders
from metaphrase.storage.folders import check_output, file_in_one_step, folder_in_one_step, write_lock, write_provenance
from metaphrase.training.experiment import Experiment

WRITE = """
import sys, time
from pathlib import Path
from metaphrase.storage.folders import file_in_one_step, folder_in_one_step
kind, output = sys.argv[1], Path(sys.argv[2])
def wait(*_):
    print("waiting", flush=True)
    time.sleep(600)
if kind == "replaced":
    rename = Path.rename
    Path.rename = lambda path, target: wait() if path.suffix == ".partial" else rename(path, target)
with (file_in_one_step if kind == "file" else folder_in_one_step)(output) as partial:
    if kind == "file":
        partial.write_text("half")
    else:
        (partial / "weights").write_text("half")
    if kind != "replaced":
        wait()
"""


@contextlib.contextmanager
def writer(kind, output):
    """A process that has begun to write `output`. It is killed at the end of the block."""
    words = [sys.executable, "-c", WRITE, kind, str(output)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        try:
            yield
        finally:
            process.kill()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_next_run_replaces_what_a_killed_run_has_left(tmp_path):
    for kind in ("file", "folder"):
        with writer(kind, tmp_path / kind):
            pass
    assert names(tmp_path) == [".file.partial", ".folder.lock", ".folder.partial"]
    with file_in_one_step(tmp_path / "file") as path:
        path.write_text("all")
    with folder_in_one_step(tmp_path / "folder") as path:
        (path / "new").touch()
    assert names(tmp_path) == ["file", "folder"] and names(tmp_path / "folder") == ["new"]


def test_a_folder_that_a_living_run_writes_is_refused_and_kept(bart, tmp_path):
    with writer("folder", tmp_path / "ours"):
        assert run("convert", [str(bart[0]), str(tmp_path / "ours")]) == 2
        assert names(tmp_path / ".ours.partial") == ["weights"]
    assert run("convert", [str(bart[0]), str(tmp_path / "ours")]) == 0
    assert names(tmp_path) == ["ours"]


def write(output, overwrite=False, during=lambda: None, content="new"):
    """Write a folder as `convert` and its like do."""
    check = functools.partial(check_output, output, [], overwrite, "made.json", "made")
    check()
    with folder_in_one_step(output, check) as partial:
        (partial / "model.safetensors").write_text(content)
        (partial / "model.safetensors").chmod(0o600)
        write_provenance(partial / "made.json")
        during()


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    output = tmp_path / "model"

    def appear():
        output.mkdir()
        (output / "thesis").write_text("mine")

    with pytest.raises(ValueError, match=r"`output` must not exist, got .*model"):
        write(output, during=appear)
    assert names(tmp_path) == ["model"] and names(output) == ["thesis"]


def test_only_what_was_written_here_is_replaced(tmp_path):
    output = tmp_path / "model"
    write(output, content="old")
    # Weights may be read by whom the other files may.
    assert len({path.stat().st_mode for path in output.iterdir()}) == 1
    (output / "metrics.json").write_text("{}")
    # `evaluate` writes the scores of the old model there.
    write(output, overwrite=True, content="new")
    assert names(output) == ["made.json", "model.safetensors"]
    for name in ("notes.txt", "checkpoint-9/model.safetensors"):
        (output / name).parent.mkdir(exist_ok=True)
        # A file that the user adds during the run is kept, too.
        for before in (False, True):
            during = (lambda: None) if before else (output / name).touch
            with pytest.raises(ValueError, match=f"only the files that made.json lists .* with {name}"):
                write(output, overwrite=True, during=during)
            assert (output / name).exists() and (output / "model.safetensors").read_text() == "new"
        (output / name).unlink()
    assert names(tmp_path) == ["model"]


def test_a_folder_that_a_killed_run_was_replacing_gets_its_name_back(tmp_path):
    output = tmp_path / "model"
    write(output, content="old")
    with writer("replaced", output):
        pass
    assert not output.exists()
    with pytest.raises(ValueError, match=r"`output` must not exist, got .*model"):
        write(output)
    assert (output / "model.safetensors").read_text() == "old"
    with pytest.raises(RuntimeError), folder_in_one_step(output):
        raise RuntimeError
    assert (output / "model.safetensors").read_text() == "old"
    write(output, overwrite=True)
    assert names(tmp_path) == ["model"] and (output / "model.safetensors").read_text() == "new"


def test_a_device_is_written_by_many_and_not_replaced(tmp_path):
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    with file_in_one_step(link) as path, OutputFile(link) as first, OutputFile(link) as second:
        path.write_text("nothing")
        first.write("one\n")
        second.write("two\n")
    assert names(tmp_path) == ["null"] and Path(os.devnull).is_char_device()


REFUSAL = r"`output` must be written by one run at a time, got .*, which another one is writing\.$"


def is_free(path):
    try:
        with write_lock(path, "output"):
            return True
    except ValueError:
        return False


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_second_run_is_refused_until_the_first_has_ended_or_was_killed(kind, tmp_path, monkeypatch, caplog):
    path = tmp_path / "place"
    path.touch() if kind == "file" else path.mkdir()
    with write_lock(path, "output"), pytest.raises(ValueError, match=REFUSAL), write_lock(path, "output"):
        pass
    assert is_free(path)
    with writer("folder", path):
        assert not is_free(path)
    assert is_free(path)
    # A forked process outlives the lock of its parent, and does not hold it.
    lock = contextlib.ExitStack()
    lock.enter_context(write_lock(path, "output"))
    if (child := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    assert not is_free(path)
    lock.close()
    deadline = time.monotonic() + 60
    while not is_free(path):
        # The child has not come to run yet.
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert names(tmp_path) == [".place.partial", "place"]
    # A place without locks locks nothing, and says so.
    monkeypatch.setattr(folders.FileLock, "acquire", Mock(side_effect=OSError(errno.ENOLCK, "no locks available")))
    with write_lock(path, "output"):
        assert is_free(path)
    assert "place is not locked against a second run: " in caplog.text


@pytest.mark.parametrize("resume", [False, True])
def test_an_output_that_is_being_written_is_left_alone(resume, cli_model, tmp_path):
    (tmp_path / "in").write_text("".join(line + "\n" for line in SOURCES), encoding="utf-8")
    words = [cli_model, "--device", "cpu", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    words += ["--resume" if resume else "--overwrite"]
    with OutputFile(tmp_path / "out", resume=resume, chunk_size=5) as first:
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
        model = type(experiment).make_model(experiment)
        with pytest.raises(ValueError, match=r"`output_dir` must be written by one run at a time, got .*run, which"):
            second.train()
        refused.append(sorted(path.name for path in run.iterdir()))
        return model

    experiment.make_model = begin_another
    experiment.train()
    assert refused == [[]] and (run / "model.safetensors").is_file()
    # A run that fails before it writes leaves no folder.
    with pytest.raises(ValueError, match="must hold the longest pair"):
        Experiment(make_recipe(data, tmp_path / "failed", max_tokens_per_batch=5)).train()
    assert not (tmp_path / "failed").exists()

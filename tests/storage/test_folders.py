"""Tests of outputs in one step: complete or absent, whoever is killed, and one writer at a time."""

import contextlib
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from converted_models import bart_like, draw

from metaphrase.scripts.__main__ import run
from metaphrase.storage.folders import (
    check_output,
    file_in_one_step,
    folder_in_one_step,
    write_provenance,
)

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
    assert names(tmp_path) == [".file.partial", ".folder.partial"]
    with file_in_one_step(tmp_path / "file") as path:
        path.write_text("all")
    with folder_in_one_step(tmp_path / "folder") as path:
        (path / "new").touch()
    assert names(tmp_path) == ["file", "folder"] and names(tmp_path / "folder") == ["new"]


def test_a_folder_that_a_living_run_writes_is_refused_and_kept(tmp_path):
    bart_like("bart", draw("bart", 100), tie_word_embeddings=True).save_pretrained(tmp_path / "bart")
    with writer("folder", tmp_path / "ours"):
        assert run("convert", [str(tmp_path / "bart"), str(tmp_path / "ours")]) == 2
        assert names(tmp_path / ".ours.partial") == ["weights"]
    assert run("convert", [str(tmp_path / "bart"), str(tmp_path / "ours")]) == 0
    assert names(tmp_path) == ["bart", "ours"]


def test_a_folder_that_a_killed_run_was_replacing_gets_its_name_back(tmp_path):
    output = tmp_path / "model"
    output.mkdir()
    (output / "weights").write_text("all")
    with writer("replaced", output):
        assert not output.exists()
    with pytest.raises(RuntimeError), folder_in_one_step(output):
        raise RuntimeError
    assert names(tmp_path) == ["model"] and (output / "weights").read_text() == "all"
    with folder_in_one_step(output) as partial:
        (partial / "weights").write_text("new")
    assert names(tmp_path) == ["model"] and (output / "weights").read_text() == "new"


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


def test_of_two_runs_with_one_output_the_later_is_refused(tmp_path):
    output = tmp_path / "model"

    def begin_again():
        with pytest.raises(ValueError, match="`output` must be written by one run at a time"):
            write(output, content="second")

    write(output, during=begin_again, content="first")
    assert (output / "model.safetensors").read_text() == "first" and names(tmp_path) == ["model"]


@pytest.mark.parametrize("name", ["notes.txt", "checkpoint-9/model.safetensors", "metrics.json"])
def test_only_what_was_written_here_is_replaced(name, tmp_path):
    output = tmp_path / "model"
    write(output, content="old")
    (output / name).parent.mkdir(exist_ok=True)
    (output / name).write_text("mine")
    if name == "metrics.json":
        # `evaluate` writes the scores of the old model there.
        write(output, overwrite=True)
        assert names(output) == ["made.json", "model.safetensors"]
        return
    with pytest.raises(ValueError, match=f"`output` must hold only the files that made.json lists .* with {name}"):
        write(output, overwrite=True)
    assert (output / name).read_text() == "mine" and (output / "model.safetensors").read_text() == "old"


def test_what_the_user_adds_meanwhile_is_kept_too(tmp_path):
    output = tmp_path / "model"
    write(output, content="old")
    with pytest.raises(ValueError, match=r"only the files that made\.json lists .* with notes"):
        write(output, overwrite=True, during=(output / "notes").touch)
    assert names(output) == ["made.json", "model.safetensors", "notes"] and names(tmp_path) == ["model"]


def test_the_next_run_finds_the_folder_that_a_killed_one_was_replacing(tmp_path):
    output = tmp_path / "model"
    write(output, content="old")
    with writer("replaced", output):
        pass
    assert not output.exists()
    with pytest.raises(ValueError, match=r"`output` must not exist, got .*model"):
        write(output)
    assert (output / "model.safetensors").read_text() == "old"


def test_weights_may_be_read_by_whom_the_other_files_may(tmp_path):
    write(tmp_path / "model")
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1


def test_a_device_is_written_and_not_replaced(tmp_path):
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    with file_in_one_step(link) as path:
        path.write_text("nothing")
    assert names(tmp_path) == ["null"] and not Path(os.devnull).is_file()

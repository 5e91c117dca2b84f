"""Tests of leftovers: the next run removes the temporary folders of killed runs, and no folder of a living one."""

import contextlib
import subprocess
import sys

import pytest
from converted_models import bart_like, draw

from metaphrase.inference.line_files import NewFile
from metaphrase.scripts.console import run
from metaphrase.scripts.convert import main as convert
from metaphrase.storage import folders
from metaphrase.storage.folders import file_in_one_step, folder_in_one_step, remove_leftovers
from metaphrase.training.run_folder import only_writer

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


def test_convert_removes_what_a_killed_run_has_left_and_nothing_else(tmp_path):
    bart_like("bart", draw("bart", 100), tie_word_embeddings=True).save_pretrained(tmp_path / "bart")
    others = [".mine.partial", ".mine.x.partial", "mine.1.partial", ".mine.1.partial~"]
    for name in others:
        (tmp_path / name).mkdir()
    with writer("folder", tmp_path / "ours"):
        with writer("folder", tmp_path / "ours"):
            pass
        # The names of earlier versions ended in the number of the process.
        (tmp_path / ".ours.4711.partial").mkdir()
        assert len(names(tmp_path)) == 8
        assert run(convert, "convert", [str(tmp_path / "bart"), str(tmp_path / "ours")]) == 0
        [living] = set(names(tmp_path)) - {"bart", "ours", *others}
        assert names(tmp_path / living) == ["weights"]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted(["bart", "ours", *others])


def test_a_folder_that_a_killed_run_was_replacing_gets_its_name_back(tmp_path):
    output = tmp_path / "model"
    output.mkdir()
    (output / "weights").write_text("all")
    with writer("replaced", output):
        assert not output.exists()
        remove_leftovers(tmp_path)
        assert not output.exists() and len(names(tmp_path)) == 2
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["model"] and (output / "weights").read_text() == "all"
    with folder_in_one_step(output) as partial:
        (partial / "weights").write_text("new")
    assert names(tmp_path) == ["model"] and (output / "weights").read_text() == "new"


@pytest.mark.parametrize("kind", ["file", "training", "text"])
def test_each_kind_of_run_removes_leftovers(kind, tmp_path):
    with writer("file", tmp_path / "metrics.json"), writer("folder", tmp_path / "model"):
        pass
    assert len(names(tmp_path)) == 2
    runs = {"file": file_in_one_step, "training": only_writer, "text": NewFile}
    with runs[kind](tmp_path / "new"):
        assert not [name for name in names(tmp_path) if "metrics" in name or "model" in name]


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    with writer("folder", tmp_path / "model"):
        pass
    monkeypatch.setattr(folders, "fcntl", None)
    remove_leftovers(tmp_path)
    assert len(names(tmp_path)) == 1


def test_a_folder_is_made_again_if_another_run_removes_it_before_it_is_locked(tmp_path, monkeypatch):
    lock, removed = folders.WriteLock, []

    def late(path, name):
        if not removed:
            path.rmdir()
            removed.append(path)
        return lock(path, name)

    monkeypatch.setattr(folders, "WriteLock", late)
    with folder_in_one_step(tmp_path / "model") as partial:
        (partial / "weights").touch()
    assert removed and names(tmp_path / "model") == ["weights"]

"""The folder of an unfinished run: whose it is, and what cannot be resumed. `test_run.py` kills runs and resumes them."""

import shutil

import pytest

from metaphrase.filtering.run import WorkFolder, partial_path


def open_folder(path, resume, **key):
    return WorkFolder({"text": path}, key, resume=resume)


def test_another_command_and_a_second_run_are_refused(tmp_path):
    path = tmp_path / "out.tsv"
    with open_folder(path, False, rules=["copy"]) as folder:
        folder.save({"read": 1})
        for resume in (True, False):
            with pytest.raises(ValueError, match="`output` must be written by one run at a time"):
                open_folder(path, resume, rules=["copy"])
    with pytest.raises(ValueError, match=r"`rules` must be \['copy'\] as in the stopped run in .*, got \['empty'\]"):
        open_folder(path, True, rules=["empty"])
    with open_folder(path, False, rules=["empty"]) as folder:
        assert folder.state == {}


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_no_run_has_written_is_left_alone(tmp_path, resume):
    own = partial_path(tmp_path / "out.tsv") / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(ValueError, match="that no run has written"):
        open_folder(tmp_path / "out.tsv", resume)
    assert own.read_text() == "mine"


def test_files_that_lost_their_ends_are_not_resumed(tmp_path):
    with open_folder(tmp_path / "out.tsv", False) as folder:
        folder.append("text", b"one\n")
        folder.save({"read": 1})
    (folder.path / "text").write_bytes(b"on")
    with pytest.raises(ValueError, match=r"text must have at least 4 bytes to go on, got 2. Pass --overwrite"):
        open_folder(tmp_path / "out.tsv", True)
    with open_folder(tmp_path / "out.tsv", False) as folder:
        assert folder.state == {}


def test_a_killed_removal_leaves_the_folder_of_a_run(tmp_path, monkeypatch):
    with open_folder(tmp_path / "out.tsv", False) as folder:
        folder.append("text", b"one\n")
        folder.save({"read": 1})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            open_folder(tmp_path / "out.tsv", False)
    assert [path.name for path in folder.path.iterdir()] == ["state.json"]
    with open_folder(tmp_path / "out.tsv", False) as folder:
        assert folder.state == {}


def killed(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("state", [{}, {"read": 1}])
def test_a_run_that_failed_at_its_beginning_leaves_no_folder(tmp_path, state):
    with pytest.raises(OSError), open_folder(tmp_path / "out.tsv", False) as folder:
        folder.save(state)
        raise OSError("the input is damaged")
    assert partial_path(tmp_path / "out.tsv").exists() == bool(state)

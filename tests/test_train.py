"""The command line: `metaphrase train` on tiny recipes."""

import json

import pytest
from small_runs import SMALL

from metaphrase.hub_card.card import MARKER
from metaphrase.scripts import train
from metaphrase.scripts.console import run

TEXTS = [f"{noun} {verb}" for noun in ("dog", "cat", "bird", "fish") for verb in ("runs", "sees", "eats")]


@pytest.fixture
def words(tmp_path):
    """The words of a run of two steps, without validation or test, in `run`."""
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{text[::-1]}\n" for text in TEXTS), encoding="utf-8")
    (tmp_path / "train.txt").write_text("".join(f"{text}\n" for text in TEXTS * 4), encoding="utf-8")
    fields = {"data_dir": tmp_path, "output_dir": tmp_path / "run", "train_file": "train.tsv"}
    fields |= {"tokenizer_kind": "char", "preset": "metaphrase-tiny", "max_steps": 2, "save_steps": 1}
    fields |= {"logging_steps": 1, "per_device_train_batch_size": 4, "use_cpu": "true", "disable_tqdm": "true"}
    fields |= {f"model.{name}": value for name, value in SMALL.items()}
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def test_a_card_by_another_hand_does_not_fail_a_run(words, tmp_path, caplog):
    words += ["--test_file", "train.tsv", "--generation_max_length", "9"]
    assert run(train.main, "train", words) == 0
    card = tmp_path / "run" / "README.md"
    claimed = card.read_text(encoding="utf-8").replace(MARKER, "My own words.")
    card.write_text(claimed, encoding="utf-8")
    assert run(train.main, "train", [*words, "--resume", "--max_steps", "3"]) == 0
    assert card.read_text(encoding="utf-8") == claimed
    assert "README.md was made or changed by somebody: it stays as it is." in caplog.text
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text(encoding="utf-8"))["global_step"] == 3

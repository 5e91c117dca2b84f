import gzip
from pathlib import Path

import pytest
from cli_texts import damaged
from subcommands import execute

from metaphrase.inference import Generator
from metaphrase.scripts import evaluate, generate
from metaphrase.scripts.__main__ import run


@pytest.mark.parametrize("name", ["plain.gz", "damaged.gz", "cut.gz", "checksum.gz"])
def test_a_damaged_input_is_a_mistake_of_one_line(name, cli_model, tmp_path, capsys):
    whole = gzip.compress("".join(f"the cat {number}\n" for number in range(900)).encode())
    made = {"plain.gz": b"the cat\n", "damaged.gz": damaged(whole), "cut.gz": whole[: len(whole) // 2]}
    made["checksum.gz"] = whole[:-6] + b"??" + whole[-4:]
    (tmp_path / name).write_bytes(made[name])
    assert run("generate", [cli_model, "--device", "cpu", "--input", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert "metaphrase generate: error: " in said and "Traceback" not in said
    assert f"`{tmp_path / name}` must be a compressed file that is whole, got: " in said


@pytest.mark.parametrize("subcommand", ["generate", "generate --resume", "evaluate", "attention"])
def test_lines_are_not_written_under_a_name_that_says_compressed(subcommand, cli_model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(Generator, "from_pretrained", None)
    output, pairs = str(tmp_path / "o.gz"), ["--source", files[0], "--target", files[1]]
    calls = {
        "generate": (generate, "output", []),
        "generate --resume": (generate, "output", ["--input", files[0], "--resume"]),
        "evaluate": (evaluate, "predictions", pairs),
        "attention": ("attention", "output", ["--input", files[0], "--format", "pharaoh"]),
    }
    script, name, words = calls[subcommand]
    with pytest.raises(ValueError, match=f"`{name}` must not end in .gz, .* got '{output}'"):
        execute(script, [cli_model, *words, f"--{name}", output])
    assert not Path(output).exists()


def test_the_limit_of_a_line_can_be_set(cli_model, tmp_path, capsys):
    (tmp_path / "in").write_text("the cat\n")
    words = [cli_model, "--device", "cpu", "--input", str(tmp_path / "in"), "--max_line_characters"]
    assert run("generate", [*words, "6"]) == 2
    assert "at most 6 characters, but line 1 has more" in capsys.readouterr().err
    assert run("generate", [*words, "7"]) == 0

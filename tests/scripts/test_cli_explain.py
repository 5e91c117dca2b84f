import errno
import json
import os
import re
from pathlib import Path

import pytest
from cli_texts import targets_of
from matplotlib.figure import Figure
from subcommands import execute, name_of

from metaphrase.scripts import explain as subcommand
from metaphrase.scripts.__main__ import run


def test_explain_writes_a_page_of_several_pairs(cli_model, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    words = [cli_model, "--device", "cpu", "--source", "the <b> cat", "--source", "two dogs", "--max_new_tokens", "3"]
    execute(subcommand, words)
    text = (tmp_path / "explanation.html").read_text(encoding="utf-8")
    assert "the \\u003cb\\u003e cat" in text and "two dogs" in text and "Written to explanation.html" in caplog.text
    assert "Targets that are unfinished at the length limit: 2 (sources: 2)." in caplog.text
    pairs = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])["pairs"]
    targets = targets_of(["the <b> cat", "two dogs"], max_new_tokens=3)
    assert [pair["target"] for pair in pairs] == targets
    execute(subcommand, [*words, "--output", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("kind", ["page", "picture"])
def test_a_full_disk_leaves_no_half_file_and_no_name_of_this_machine(cli_model, tmp_path, kind, monkeypatch, capsys):
    path = tmp_path / ("page.html" if kind == "page" else "map.png")
    words = [cli_model, "--device", "cpu", "--source", "the cat", "--target", "a", "--output", str(path)]
    module = subcommand if kind == "page" else "attention"
    execute(module, words)
    written = path.read_bytes()
    assert Path(cli_model).parent.name.encode() not in written
    if kind == "page":
        assert b"<title>Explanation of model</title>" in written

    def fill_disk(self, *arguments, **_):
        target = self if isinstance(self, Path) else arguments[0]
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for owner, name in ((Path, "write_text"), (Figure, "savefig")):
        monkeypatch.setattr(owner, name, fill_disk)
    assert run(name_of(module), words) == 2 and f"No space left on device (output: {path})" in capsys.readouterr().err
    assert path.read_bytes() == written and [file.name for file in tmp_path.iterdir()] == [path.name]

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_texts import contents
from huggingface_hub import ModelCard, constants
from pushed_folder import FORBIDDEN, push_words
from subcommands import execute
from tiny_generator import save_generator, tiny_generator

from metaphrase.hub_card import Facts, upload, write_model_card
from metaphrase.scripts import push
from metaphrase.scripts.__main__ import run
from metaphrase.training.recipe.recipe import load_recipe


def test_exactly_the_model_goes_up_byte_for_byte(hub, folder, capsys):
    execute(push, push_words(folder, "--private", "--commit_message", "first"))
    [(branch, message, files)] = hub.commits
    assert (branch, message) == ("main", "first")
    assert files == {name: content for name, content in contents(folder).items() if name not in FORBIDDEN}
    assert not any(b"forbidden" in content for content in files.values())
    assert hub.repositories["somebody/tiny"]["visibility"] == "private"
    tokens = {token for _, path, token, _ in hub.calls if path == "/api/repos/create" or "somebody/tiny" in path}
    assert tokens == {"Bearer hf_of_the_test"}
    assert re.fullmatch(r"somebody/tiny [0-9a-f]{40}\n", capsys.readouterr().out)


RECIPE_WITH_PATHS_AND_SECRETS = r"""
accelerator_config: {token: s3cret-of-accelerate, split_batches: true}
tokenizer_name_or_path: /home/jane/clients/acme/tokenizer
resume_from_checkpoint: /home/jane/runs/acme/checkpoint-10
learning_rate: 1e-3
target_language: no
tasks:
  translate: {train_file: ~/clients/acme/train.tsv, source_prefix: "/translate "}
  summarize: {train_file: C:\clients\acme\all.tsv, source_prefix: "/summarize ", validation_file: data/dev.tsv}
  other: {train_file: s3://AKIAEXAMPLE:S3CRET@bucket/a.tsv, hub_token: hf_s3cretOfOneTaskItself, source_prefix: TOKEN}
"""


def test_recipe_goes_up_without_secrets_and_the_folders_of_this_machine(hub, folder, tmp_path, capsys):
    text = RECIPE_WITH_PATHS_AND_SECRETS.replace("TOKEN", "'hf_s3cretOfOneTaskItself: '")
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    execute(push, push_words(folder, "--dry_run"))
    said = capsys.readouterr().out
    execute(push, push_words(folder))
    files = hub.commits[0][2]
    shared = tmp_path / "shared.yaml"
    shared.write_bytes(files["recipe.yaml"])
    assert load_recipe(shared).to_dict() == {
        "accelerator_config": {"split_batches": True},
        "tokenizer_name_or_path": "tokenizer",
        "learning_rate": 1e-3,
        "target_language": "no",
        "tasks": {
            "translate": {"train_file": "train.tsv", "source_prefix": "/translate "},
            "summarize": {"train_file": "all.tsv", "source_prefix": "/summarize ", "validation_file": "data/dev.tsv"},
            "other": {"train_file": "s3://bucket/a.tsv", "source_prefix": ": "},
        },
    }
    assert not any(re.search(rb"jane|clients|s3cret|AKIA", content, re.IGNORECASE) for content in files.values())
    cut = rf"^ +{shared.stat().st_size}  recipe.yaml \(without secrets and absolute paths\)$"
    assert re.search(cut, said, re.MULTILINE) and b"checkpoint-10" in files["recipe.yaml"]
    assert (folder / "recipe.yaml").read_text(encoding="utf-8") == text


GIVEN = {"license": "apache-2.0", "base_model": "me/base", "datasets": ["me/pairs", "me/more"], "tags": ["demo"]}


def stated(card):
    """Of a card what no file of its folder says."""
    data = ModelCard(card.decode()).data
    return {name: getattr(data, name) for name in GIVEN} | {"tags": data.tags[2:]}


def test_what_a_card_was_given_stays_in_it(hub, folder):
    summary = "Written *by hand*.\n\n- Source language: see below\n- & more"
    words = {"summary": summary, "task": "summarization", "source_language": "Old_Norse & <Danish>"}
    path = write_model_card(folder, Facts(**GIVEN, **words))
    assert "path/to/this/folder" in path.read_text(encoding="utf-8")
    for name in ("tiny", "other"):
        execute(push, push_words(folder, repo_id=f"somebody/{name}"))
        card = hub.commits[-1][2]["README.md"]
        text = card.decode()
        assert stated(card) == GIVEN and ModelCard(text).data.pipeline_tag == "summarization"
        assert f"{summary}\n\n- Source language: Old\\_Norse &amp; &lt;Danish&gt;\n" in text
        assert "- Target language: unknown\n" in text and "- Licence: apache-2.0\n" in text
        assert f"# {name}\n" in text and f'model_id = "somebody/{name}"' in text and path.read_bytes() == card
    assert "visibility" not in hub.repositories["somebody/tiny"]


def test_options_of_the_card_replace_what_it_was_given(hub, folder):
    write_model_card(folder, Facts(**GIVEN))
    execute(push, push_words(folder, "--license", "mit", "--datasets", "me/third"))
    assert stated(hub.commits[-1][2]["README.md"]) == GIVEN | {"license": "mit", "datasets": ["me/third"]}
    (folder / "README.md").unlink()
    execute(push, push_words(folder, "--base_model", "me/other"))
    expected = {"license": None, "base_model": "me/other", "datasets": None, "tags": []}
    assert stated(hub.commits[-1][2]["README.md"]) == expected


def test_options_of_the_card_need_a_card_that_is_written(hub, folder):
    (folder / "README.md").write_text("my own words", encoding="utf-8")
    with pytest.raises(ValueError, match="`license` must be left out"):
        execute(push, push_words(folder, "--license", "mit", "--dry_run"))
    execute(push, push_words(folder))
    execute(push, push_words(folder, "--license", "mit", "--overwrite_card"))
    first, second = (files["README.md"] for _, _, files in hub.commits)
    assert first == b"my own words" and stated(second)["license"] == "mit" and b"somebody/tiny" in second


def test_card_whose_metadata_cannot_be_read_is_not_replaced(hub, folder):
    path = write_model_card(folder)
    broken = path.read_text(encoding="utf-8").replace("---\n", "---\nlicense: [\n", 1)
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(ValueError, match=r"README\.md must be a card with readable metadata"):
        execute(push, push_words(folder))
    assert path.read_text(encoding="utf-8") == broken and hub.calls == []


def test_existing_repository_and_other_branch(hub, folder, capsys):
    for _ in range(2):
        execute(push, push_words(folder, "--revision", "second"))
    assert [branch for branch, _, _ in hub.commits] == ["second", "second"] == hub.branches
    assert list(hub.repositories) == ["somebody/tiny"]
    assert run("push", push_words(folder, "--private")) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("`private` must be left out for a repository that is public, got 'somebody/tiny'.")
    assert len(hub.commits) == 2
    for _ in range(2):
        execute(push, push_words(folder, "--private", repo_id="somebody/hidden"))
    assert len(hub.commits) == 4


def test_large_files_go_to_their_own_store(hub, folder):
    hub.lfs_suffixes = (".safetensors",)
    execute(push, push_words(folder))
    weights = (folder / "model.safetensors").read_bytes()
    assert list(hub.objects.values()) == [weights] and hub.commits[0][2]["model.safetensors"] == weights


def test_dry_run_tells_all_and_does_nothing(folder, monkeypatch, capsys):
    monkeypatch.setattr("socket.socket.connect", None)
    before = contents(folder)
    execute(push, push_words(folder, "--dry_run", "--license", "mit", "--datasets", "me/pairs", "me/more"))
    assert contents(folder) == before
    said = capsys.readouterr().out
    shared = {name: len(content) for name, content in before.items() if name not in FORBIDDEN}
    for name, size in shared.items():
        assert re.search(rf"^ +{size:,}  {re.escape(name)}$", said, re.MULTILINE)
    assert f"{sum(shared.values()):,}  bytes in {len(shared)} files" in said
    assert re.search(r"will be written  README.md", said) and "somebody/tiny, branch main" in said
    assert re.search(r"^ +license: mit\n +datasets: me/pairs, me/more$", said, re.MULTILINE)
    for name in FORBIDDEN:
        top = name if name.startswith("target_tokenizer") or "/" not in name else name.split("/")[0] + "/"
        assert re.search(rf"^ +left out  {re.escape(top)}$", said, re.MULTILINE), name


def test_files_of_other_tokenizers_and_pictures_of_the_card_go_up(folder):
    (folder / "README.md").write_text("![a](training_curve.png) ![b](./shown.png)", encoding="utf-8")
    names = {"spiece.model", "source.spm", "target.spm", "merges.txt", "chat_template.jinja", "training_curve.png"}
    names |= {"bpe.codes", "dict.txt", "LICENSE", "NOTICE.txt", "shown.png"}
    for name in {*names, "other.model", "script.sh", "curve.png"}:
        (folder / name).write_bytes(b"x")
    selected, left_out = upload.select_files(folder)
    assert names <= selected.keys() and {"other.model", "script.sh", "curve.png"} <= {*left_out}


def shard(folder, num_shards):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {str(number): f"model-{number}.safetensors" for number in range(1, num_shards + 1)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def test_shards_go_up_with_their_index(folder):
    shard(folder, 1)
    upload.check_folder(folder)
    sizes = upload.select_files(folder)[0]
    assert {name for name in sizes if "safetensors" in name} == {"model-1.safetensors", "model.safetensors.index.json"}


def cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def diverge(folder):
    model = tiny_generator(joint=False).model
    model.lm_head.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)


def link(name):
    def put(folder):
        (folder.parent / "key").write_text("private")
        (folder / name).symlink_to(folder.parent / "key")

    return put


def rename(name):
    return lambda folder: (folder / name).rename(folder / f"other.{name}")


def write(name, text):
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


REFUSED = {
    "cut weights": (cut, "must hold whole weights, got "),
    # Weights of another name are not taken for the model's.
    "other weights": (rename("model.safetensors"), "without model.safetensors"),
    "missing shard": (lambda folder: shard(folder, 2), "model-2.safetensors"),
    "weights that are not finite": (diverge, "must hold finite numbers"),
    "no configuration": (rename("config.json"), "without config.json"),
    "secret": (write("recipe.yaml", "hub_token: hf_abc\n"), "must hold no secret"),
    "tokenizer": (write("tokenizer.json", '{"model": {"type": "BPE"}}'), "The files of the tokenizer in"),
    "link": (link("LICENSE"), "`folder` must hold no link"),
    "deep link": (link("target_tokenizer/vocab.txt"), "`folder` must hold no link"),
    **{
        name: (write(name, "["), f"metaphrase push: error: `{name}` must be readable, got an error in ")
        for name in ("recipe.yaml", "config.json", "tokenizer_config.json")
    },
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_must_not_go_up_is_one_line_and_nothing_is_written(damage, hub, folder, capsys):
    make, message = REFUSED[damage]
    make(folder)
    for options in ([], ["--dry_run"]):
        assert run("push", push_words(folder, *options)) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        assert message in line
    assert hub.commits == []


@pytest.mark.parametrize("refusal", [(401, "Invalid username or password"), (500, "Out of order")])
def test_refusal_is_one_line(hub, folder, refusal, capsys):
    hub.refusal = refusal
    assert run("push", push_words(folder)) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert re.match("metaphrase push: error: .*{}.*{}".format(*refusal), line)
    assert "hf_of_the_test" not in line and hub.commits == []


@pytest.mark.parametrize("lack", ["token", "network"])
def test_without_token_or_network_nothing_is_written(lack, hub, folder, monkeypatch, capsys):
    words = push_words(folder)
    if lack == "token":
        monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
        words = [str(folder), "somebody/tiny"]
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    before = contents(folder)
    assert run("push", words) == 2
    said = capsys.readouterr().err
    expected = {"token": "hf auth login", "network": "Connection refused"}
    assert said.startswith("metaphrase push: error: ") and expected[lack] in said and said.count("\n") == 1
    assert contents(folder) == before and hub.calls == []


@pytest.mark.slow
def test_push_to_hub_of_model_and_tokenizer(hub, tmp_path):
    """transformers' own way, in a process that knows the stand-in from its start."""
    folder = save_generator(tiny_generator(), tmp_path / "trained")
    program = (
        "import sys, metaphrase.modeling\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "for kind in (AutoModelForSeq2SeqLM, AutoTokenizer):\n"
        "    kind.from_pretrained(sys.argv[1]).push_to_hub('somebody/tiny', token='hf_of_the_test')\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=True, timeout=120)
    model, tokenizer = (files for _, _, files in hub.commits)
    assert json.loads(model["config.json"])["auto_map"]["AutoModelForSeq2SeqLM"].startswith("modeling_metaphrase.")
    code = {path.name for path in Path(push.__file__).parents[1].joinpath("modeling").glob("*.py")} - {"__init__.py"}
    assert {name for name in model if name.endswith(".py")} == code
    assert model["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert json.loads(tokenizer["tokenizer.json"]) == json.loads((folder / "tokenizer.json").read_bytes())
    assert not any(name.endswith((".bin", ".pt")) for name in {**model, **tokenizer})


def test_an_export_for_browsers_goes_up_without_the_library(hub, tmp_path, capsys):
    names = ["config.json", "index.html", "onnx/encoder_model.onnx", "library/transformers.min.js", "README.md"]
    for name in [*names, "notes.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"model_type": "bart"}' if name == "config.json" else f"content of {name}")
    (tmp_path / "export.json").write_text(json.dumps({"to": "web", "files": names}))
    execute(push, push_words(tmp_path, "--dry_run"))
    said = capsys.readouterr().out
    assert "left out  library/\n" in said and "will be written" not in said
    execute(push, push_words(tmp_path))
    [(_, _, files)] = hub.commits
    assert files.keys() == {*names} - {"library/transformers.min.js"}
    assert files["README.md"] == b"content of README.md"
    with pytest.raises(ValueError, match="`license` must be left out"):
        execute(push, push_words(tmp_path, "--license", "mit"))
    (tmp_path / "index.html").unlink()
    with pytest.raises(ValueError, match=r"must hold a whole export, got .* without index\.html"):
        execute(push, push_words(tmp_path))

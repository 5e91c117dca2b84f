"""Tests of a data set's name in place of a recipe: folders, and a local server in place of the Hub."""

import hashlib
import json
import threading
from http.server import ThreadingHTTPServer

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_stand_in import QuietHandler
from huggingface_hub import constants

from metaphrase.scripts import train
from metaphrase.scripts.__main__ import run
from metaphrase.training.choices.dataset import choose_dataset, find_columns
from metaphrase.training.choices.rules import OpenRecipe
from metaphrase.training.recipe.recipe import Recipe, load_recipe

TEXTS = [
    f"{noun} {verb} {adverb}" for noun in ("dog", "cat", "bird") for verb in ("runs", "sees") for adverb in "abcdef"
]
SMALL = ["--model.hidden_size", "16", "--model.encoder_layers", "1", "--model.decoder_layers", "1", "--max_steps", "2"]
COMMIT = "a" * 40


def write(folder, ending, source, target, splits):
    folder.mkdir()
    for split in splits:
        rows = [{"id": number, source: text, target: text[::-1]} for number, text in enumerate(TEXTS)]
        path = folder / f"{split}.{ending}"
        if ending == "csv":
            path.write_text("".join(",".join(map(str, row)) + "\n" for row in ([*rows[0]], *map(dict.values, rows))))
        elif ending == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
    return str(folder)


def chosen(name, **fields):
    recipe = OpenRecipe(Recipe().replace(dataset_name=name, **fields))
    choose_dataset(recipe)
    return recipe.recipe


@pytest.mark.parametrize(
    ("ending", "columns"),
    [("csv", ("source", "target")), ("jsonl", ("document", "summary")), ("parquet", ("src", "tgt"))],
)
def test_splits_and_columns_of_a_folder_are_found(ending, columns, tmp_path):
    recipe = chosen(write(tmp_path / "folder", ending, *columns, ("train", "validation", "test")))
    assert (recipe.source_column, recipe.target_column) == columns
    assert (recipe.dataset_validation_split, recipe.dataset_test_split) == ("validation", "test")


def test_part_of_a_split_is_no_other_split(tmp_path):
    folder = write(tmp_path / "folder", "jsonl", "source", "target", ("train",))
    recipe = chosen(folder, dataset_train_split="train[:50%]")
    assert (recipe.source_column, recipe.target_column) == ("source", "target")
    assert recipe.dataset_validation_split is None


def test_given_columns_and_splits_stay(tmp_path):
    folder = write(tmp_path / "folder", "jsonl", "en", "de", ("train", "validation", "test"))
    recipe = chosen(folder, source_column="de", target_column="en", num_validation=5)
    assert (recipe.source_column, recipe.target_column) == ("de", "en")
    assert recipe.dataset_validation_split is None and recipe.dataset_test_split == "test"
    with pytest.raises(ValueError, match=r"must be given for .*folder, which has id, en, de, got neither"):
        chosen(folder)
    with pytest.raises(ValueError, match='Unknown split "dev"'):
        chosen(folder, dataset_train_split="dev")


def test_a_configuration_decides_the_direction_of_translations():
    row = {"translation": {"de": "ja", "en": "yes"}}
    assert find_columns(row, "wmt", "de-en") == ("de", "en")
    assert find_columns(row, "wmt", "en-de") == ("en", "de")
    for config in (None, "de", "en-fr"):
        with pytest.raises(ValueError, match="for wmt, which has de, en, got neither"):
            find_columns(row, "wmt", config)
    assert find_columns(dict.fromkeys(("text", "target", "source", "summary")), "news", None) == ("source", "target")
    with pytest.raises(ValueError, match="which has text, article, summary"):
        find_columns(dict.fromkeys(("text", "article", "summary")), "news", None)


def test_a_folder_in_place_of_a_recipe_becomes_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "corpus", "csv", "text", "summary", ("train", "test"))
    assert run("train", ["corpus", *SMALL, "--num_validation", "4", "--disable_tqdm"]) == 0
    folder = tmp_path / "runs" / "corpus"
    recipe = load_recipe(folder / "recipe.yaml")
    assert (recipe.dataset_name, recipe.source_column, recipe.target_column) == ("corpus", "text", "summary")
    assert "# corpus has the columns id, text, summary" in (folder / "recipe.yaml").read_text(encoding="utf-8")
    assert json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["data"]["split"] == "test"


def test_a_name_is_a_recipe_before_it_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "corpus").mkdir()
    assert train.find_data(["demo"]) == (train.RECIPES / "demo.yaml", [])
    assert train.find_data(["corpus"]) == (None, ["--dataset_name", "corpus"])
    assert train.find_data(["me/pairs"]) == (None, ["--dataset_name", "me/pairs"])
    with pytest.raises(
        FileNotFoundError, match=r"one of .*demo, .* got 'dmeo'. A data set must be a folder, or OWNER/NAME"
    ):
        train.find_data(["dmeo"])
    with pytest.raises(FileNotFoundError, match=r"got 'recipes/mine\.yaml'"):
        train.find_data(["recipes/mine.yaml"])


class DatasetHandler(QuietHandler):
    """Answers the calls that reading a data set makes."""

    def do_GET(self):
        files, path = self.server.files, self.path.partition("?")[0]
        sizes = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]
        if path in ("/api/datasets/me/pairs", f"/api/datasets/me/pairs/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in files]
            return self.answer(200, {"id": "me/pairs", "sha": COMMIT, "siblings": siblings, "tags": []})
        if path == f"/api/datasets/me/pairs/tree/{COMMIT}":
            return self.answer(200, sizes)
        is_known = "/datasets/me/pairs/" in path
        content = files.get(path.rpartition("/")[2])
        if content is None or not is_known:
            return self.answer(404, {}, X_Error_Code="EntryNotFound" if is_known else "RepoNotFound")
        self.answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), DatasetHandler) as server:
        server.files, url = {}, f"http://127.0.0.1:{server.server_port}"
        for owner in (constants, datasets.config):
            monkeypatch.setattr(owner, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)
        huggingface_hub.close_session()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    huggingface_hub.close_session()


def test_splits_and_columns_of_a_data_set_on_the_hub_are_found(hub):
    rows = "".join(json.dumps({"question": text, "answer": text[::-1]}) + "\n" for text in TEXTS).encode()
    hub.files = {"train.jsonl": rows, "validation.jsonl": rows}
    recipe = chosen("me/pairs")
    assert (recipe.source_column, recipe.target_column) == ("question", "answer")
    assert recipe.dataset_validation_split == "validation" and recipe.dataset_test_split is None
    with pytest.raises(
        FileNotFoundError, match="must be a data set of the Hub or a folder that exists, got 'me/other'"
    ):
        chosen("me/other")

"""Tests of a data set's name in place of a recipe."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaphrase.scripts import train
from metaphrase.scripts.__main__ import run
from metaphrase.training.choices.completion import choose_dataset, find_columns
from metaphrase.training.choices.rules import OpenRecipe
from metaphrase.training.recipe.recipe import Recipe, load_recipe

TEXTS = [
    f"{noun} {verb} {adverb}" for noun in ("dog", "cat", "bird") for verb in ("runs", "sees") for adverb in "abcdef"
]
SMALL = ["--model.hidden_size", "16", "--model.encoder_layers", "1", "--model.decoder_layers", "1", "--max_steps", "2"]


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


def test_given_columns_and_splits_stay(tmp_path):
    folder = write(tmp_path / "folder", "jsonl", "en", "de", ("train", "validation", "test"))
    recipe = chosen(folder, source_column="de", target_column="en", num_validation=5)
    assert (recipe.source_column, recipe.target_column) == ("de", "en")
    assert recipe.dataset_validation_split is None and recipe.dataset_test_split == "test"
    with pytest.raises(ValueError, match=r"must be given for .*folder, which has id, en, de, got neither"):
        chosen(folder)
    with pytest.raises(FileNotFoundError, match="`dataset_name` must be a data set of the Hub or a folder"):
        chosen("me/other")


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

import json
import os
from pathlib import Path

import pytest
from cli_texts import as_lines, targets_of
from sacrebleu.metrics import BLEU
from subcommands import execute
from tiny_generator import PIECES, SOURCES, TARGETS, save_generator, tiny_generator

from metaphrase.evaluation import evaluate as evaluation
from metaphrase.inference import Generator
from metaphrase.scripts import evaluate
from metaphrase.scripts.__main__ import run


def test_evaluate_writes_scores_and_predictions(cli_model, files, tmp_path, caplog):
    caplog.set_level("INFO")
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1], "--num_beams", "2"]
    execute(evaluate, [*words, "--output", str(tmp_path / "m.json"), "--predictions", str(tmp_path / "new" / "p.txt")])
    predictions = (tmp_path / "new" / "p.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert predictions == as_lines(targets_of(SOURCES, num_beams=2))
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    expected = BLEU().corpus_score(targets_of(SOURCES, num_beams=2), [TARGETS]).score
    assert result["scores"]["bleu"]["score"] == pytest.approx(expected)
    assert result["scores"].keys() == {"bleu", "chrf"} and "tok:13a" in result["scores"]["bleu"]["signature"]
    assert result["generation"]["num_beams"] == 2 and result["num_examples"] == 5
    shown = result["scores"]["bleu"]
    expected = BLEU().corpus_score(targets_of(SOURCES, num_beams=2), [TARGETS], n_bootstrap=1000)
    assert (shown["confidence_var"], shown["bs"], shown["seed"]) == (expected._ci, 1000, "12345")
    limits = shown["confidence_interval"]
    assert f"bleu: {shown['score']:.2f} (95 % interval {limits[0]:.2f} to {limits[1]:.2f})  nrefs:1" in caplog.text
    execute(evaluate, [*words, "--output", str(tmp_path / "m.json"), "--confidence_n", "0"])
    assert "confidence_var" not in json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))["scores"]["bleu"]
    assert result["data"]["name"] == "test.en"


STOPPING = [(None, "--num_beams 2", True), (None, "--num_beams 2 --early_stopping false", False)]
STOPPING += [("never", "--num_beams 2", "never"), (None, "--num_beams 1", None)]


@pytest.mark.parametrize(("saved", "words", "expected"), STOPPING)
def test_beams_of_a_subcommand_stop_early_unless_model_or_user_say_otherwise(saved, words, expected, files, tmp_path):
    generator = tiny_generator()
    generator.model.generation_config.update(num_beams=3, early_stopping=saved)
    folder = str(save_generator(generator, tmp_path / "model"))
    execute(evaluate, [folder, "--device", "cpu", "--source", files[0], "--target", files[1], *words.split()])
    result = json.loads((tmp_path / "model" / "metrics.json").read_text(encoding="utf-8"))
    assert result["generation"].get("early_stopping") == expected
    assert Generator.from_pretrained(folder).model.generation_config.early_stopping == saved


@pytest.mark.parametrize("words", [["--ensemble", "MODEL"], ["--use_vmap"]], ids=str)
def test_scores_of_another_model_than_the_saved_one_stay_out_of_its_folder(words, files, tmp_path, monkeypatch):
    generator = tiny_generator()
    folder = save_generator(generator, tmp_path / "model")
    tokens = generator.tokenizers.target.get_vocab()
    (folder / "vmap.txt").write_text("\t" + " ".join(tokens) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = [str(folder) if word == "MODEL" else word for word in words]
    execute(evaluate, [str(folder), "--device", "cpu", "--source", files[0], "--target", files[1], *words])
    assert not (folder / "metrics.json").exists()
    result = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert result["num_examples"] == 5 and result["inference"]["models"] == (2 if "--ensemble" in words else 1)
    assert ("loss" in result) == ("--ensemble" not in words)


@pytest.mark.parametrize("words", ["", "--metrics chrf"])
def test_scores_are_those_of_the_recipe_of_the_run(words, files, tmp_path):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    (folder / "recipe.yaml").write_text("metrics: [exact_match, bleu]\nbleu_tokenize: char\n", encoding="utf-8")
    execute(evaluate, [str(folder), "--device", "cpu", "--source", files[0], "--target", files[1], *words.split()])
    scores = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["scores"]
    assert [*scores] == (["chrf"] if words else ["exact_match", "bleu"])
    assert words or "tok:char" in scores["bleu"]["signature"]


@pytest.fixture
def scored_folder(files, tmp_path, monkeypatch):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = [str(folder), "--device", "cpu", "--metrics", "chrf", "--source", files[0], "--target", files[1]]
    execute(evaluate, [*words, "--confidence_n", "0"])
    return folder, [*words, "--confidence_n", "0"]


def test_evaluate_again_replaces_what_it_measured(scored_folder):
    folder, words = scored_folder
    assert json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["scores"].keys() == {"chrf"}
    execute(evaluate, [*words, "--metrics", "bleu", "chrf", "--bleu_tokenize", "none", "--lowercase"])
    scores = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["scores"]
    assert scores.keys() == {"bleu", "chrf"} and not Path("metrics.json").exists()
    assert "case:lc" in scores["bleu"]["signature"] and "tok:none" in scores["bleu"]["signature"]


@pytest.mark.parametrize("words", [["--target", "TURNED"], ["--length_penalty", "2.5"]])
def test_scores_of_other_pairs_or_settings_stay_in_the_folder(words, scored_folder, tmp_path, caplog, monkeypatch):
    folder, same = scored_folder
    earlier = (folder / "metrics.json").read_text(encoding="utf-8")
    turned = tmp_path / "turned.de"
    turned.write_text("\n".join(reversed(TARGETS)), encoding="utf-8")
    words = [*same, *(str(turned) if word == "TURNED" else word for word in words)]
    execute(evaluate, words)
    assert json.loads(Path("metrics.json").read_text(encoding="utf-8"))["num_examples"] == 5
    kept = f"{folder}/metrics.json is kept: it holds scores of the training run, or of other pairs or settings."
    assert f"The scores will be written to {Path('metrics.json').absolute()}. {kept}" in caplog.text
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="`output` must be given in a model's folder"):
        patch.chdir(folder)
        execute(evaluate, words)
    assert (folder / "metrics.json").read_text(encoding="utf-8") == earlier
    execute(evaluate, [*words, "--output", str(folder)])
    assert (folder / "metrics.json").read_text(encoding="utf-8") != earlier


@pytest.mark.parametrize("change", [{"tasks": {}, "data": {"name": "test.en", "split": "test", "num_train": 9}}, None])
def test_scores_of_the_training_run_stay_in_the_folder(change, scored_folder):
    folder, words = scored_folder
    path = folder / "metrics.json"
    own = json.loads(path.read_text(encoding="utf-8"))
    earlier = "no JSON" if change is None else json.dumps(own | change)
    path.write_text(earlier, encoding="utf-8")
    execute(evaluate, words)
    assert path.read_text(encoding="utf-8") == earlier
    assert json.loads(Path("metrics.json").read_text(encoding="utf-8")) == own


def test_pieces_of_the_references_are_joined(files, tmp_path):
    pieces, output = tmp_path / "pieces.de", tmp_path / "m.json"
    pieces.write_text("\n".join(PIECES), encoding="utf-8")
    model = str(save_generator(tiny_generator(), tmp_path / "plain"))
    results = []
    for words in ([files[1]], [str(pieces), "--joiner", "@@"]):
        words = [model, "--device", "cpu", "--source", files[0], "--output", str(output), "--target", *words]
        execute(evaluate, words)
        results.append(json.loads(output.read_text(encoding="utf-8")))
    assert results[0]["scores"] == results[1]["scores"] and results[0]["loss"] == results[1]["loss"]


def test_evaluate_reads_files_as_training_does(cli_model, files, tmp_path, capsys):
    words = [cli_model, "--device", "cpu", "--metrics", "chrf", "--output", str(tmp_path / "m.json")]
    execute(evaluate, [*words, "--source", files[0], "--target", files[1]])
    expected = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    rows = [f"{index}\t{target}\t{source}" for index, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True))]
    numbered, named = tmp_path / "numbered.tsv", tmp_path / "named.tsv"
    numbered.write_text("\n".join(rows), encoding="utf-8")
    named.write_text("\n".join(["id\tde\ten", *rows, "no pair"]), encoding="utf-8")
    execute(evaluate, [*words, "--file", str(numbered), "--source_column", "2", "--target_column", "1"])
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    assert result == expected | {"data": expected["data"] | {"name": "numbered.tsv"}}
    words += ["--file", str(named), "--source_column", "en", "--target_column", "de"]
    assert run("evaluate", words) == 2
    assert "3 tab-separated columns, got 1 in line 7. `malformed: skip`" in capsys.readouterr().err
    execute(evaluate, [*words, "--malformed", "skip"])
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    assert result == expected | {"data": expected["data"] | {"name": "named.tsv", "malformed": 1}}


def test_evaluate_reads_the_columns_of_features_of_the_run(tmp_path):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    (folder / "recipe.yaml").write_text("source_column: [0, 2]\ntarget_column: 1\n")
    (tmp_path / "forms.tsv").write_text("a cat\teine Katze\tV;PST\n")
    words = [str(folder), "--device", "cpu", "--metrics", "chrf", "--file", str(tmp_path / "forms.tsv")]
    predictions = tmp_path / "p.txt"
    execute(evaluate, [*words, "--output", str(tmp_path / "m.json"), "--predictions", str(predictions)])
    [expected] = Generator.from_pretrained(folder, device="cpu").generate(["a cat;PST;V"])
    assert predictions.read_text(encoding="utf-8") == expected + "\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--metrics", "blue"], "A name in `metrics` must be one of bleu, .*, got 'blue'. Did you mean 'bleu'?"),
        (["--bleu_tokenize", "nosuch"], "`bleu_tokenize` must be one of none, .*, got 'nosuch'."),
        (["--metrics", "ter", "--lowercase"], "`lowercase` must come with a score that depends on case"),
        (["--source_column", "zz"], "`file` must be given with `source_column`, got None and 'zz'"),
        (["--output", "link"], "`output` must be another file than `target`, got 'link' for both"),
        (["--output", "m.json", "--predictions", "./m.json"], "`predictions` must be another file than `output`"),
        (["--predictions", "o.gz"], "`predictions` must not end in .gz, because it is not compressed, got 'o.gz'."),
        (["--output", "sealed/m.json"], "`output` must be in a folder that you may write to, got sealed"),
    ],
    ids=str,
)
def test_evaluate_finds_mistakes_before_it_decodes(words, said, cli_model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(Generator, "generate", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "sealed")
    (tmp_path / "sealed").mkdir()
    (tmp_path / "link").symlink_to("test.de")
    with pytest.raises((ValueError, OSError), match=said):
        execute(evaluate, [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1], *words])
    assert [Path(path).read_text(encoding="utf-8").splitlines() for path in files] == [SOURCES, TARGETS]


def test_evaluate_keeps_predictions_when_it_cannot_decode_or_score(cli_model, files, tmp_path, monkeypatch):
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1], "--output", str(tmp_path)]
    predictions, older = tmp_path / "p.txt", ["an older target"]
    predictions.write_text("an older target\n", encoding="utf-8")
    for place, name, expected in ((Generator, "generate_n_best", older), (evaluation, "compute_metrics", None)):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(place, name, lambda *_, **__: 1 / 0)
            execute(evaluate, [*words, "--predictions", str(predictions)])
        assert predictions.read_text(encoding="utf-8").split("\n")[:-1] == (expected or as_lines(targets_of(SOURCES)))

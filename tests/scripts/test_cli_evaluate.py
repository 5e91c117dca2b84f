"""The command line: `metaphrase evaluate` on tiny models."""

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
from cli_texts import as_lines, targets_of
from sacrebleu.metrics import BLEU
from tiny_generator import PIECES, SOURCES, TARGETS, diverged_generator, save_generator, tiny_generator
from verbs import execute

from metaphrase.evaluation import evaluate as evaluation
from metaphrase.evaluation.evaluate import evaluate_generator
from metaphrase.inference import Generator
from metaphrase.scripts import evaluate
from metaphrase.scripts.__main__ import run


def test_a_prefix_that_fills_the_sources_is_refused(cli_model, files, tmp_path, capsys):
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1]]
    words += ["--max_source_length", "5", "--source_prefix", "the small cat: ", "--output", str(tmp_path / "m.json")]
    assert run("evaluate", words) == 2
    assert "`max_source_length` must be above" in capsys.readouterr().err
    assert not (tmp_path / "m.json").exists()


def test_evaluate_writes_scores_and_predictions(cli_model, files, tmp_path, caplog):
    caplog.set_level("INFO")
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1], "--num_beams", "2"]
    execute(evaluate, [*words, "--output", str(tmp_path / "m.json"), "--predictions", str(tmp_path / "p.txt")])
    predictions = (tmp_path / "p.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert predictions == as_lines(targets_of(SOURCES, num_beams=2))
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    expected = BLEU().corpus_score(targets_of(SOURCES, num_beams=2), [TARGETS]).score
    assert result["scores"]["bleu"]["score"] == pytest.approx(expected)
    assert result["scores"].keys() == {"bleu", "chrf"} and "tok:13a" in result["scores"]["bleu"]["signature"]
    assert result["generation"]["num_beams"] == 2 and result["num_examples"] == 5
    shown = result["scores"]["bleu"]
    expected = BLEU().corpus_score(targets_of(SOURCES, num_beams=2), [TARGETS], n_bootstrap=1000)
    assert (shown["confidence_var"], shown["bs"], shown["seed"]) == (expected._ci, 1000, "12345")
    limits = [shown["confidence_mean"] + sign * shown["confidence_var"] for sign in (-1, 1)]
    assert f"bleu: {shown['score']:.2f} (95 % interval {limits[0]:.2f} to {limits[1]:.2f})  nrefs:1" in caplog.text
    execute(evaluate, [*words, "--output", str(tmp_path / "m.json"), "--confidence_n", "0"])
    assert "confidence_var" not in json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))["scores"]["bleu"]
    assert result["data"]["name"] == "test.en"


def test_a_prefix_stands_before_each_source_once(cli_model, files, tmp_path):
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1], "--source_prefix", "the "]
    execute(evaluate, [*words, "--output", str(tmp_path / "m.json"), "--predictions", str(tmp_path / "p.txt")])
    once, twice = ([prefix + text for text in SOURCES] for prefix in ("the ", "the the "))
    assert targets_of(once) != targets_of(twice)
    predictions = (tmp_path / "p.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert predictions == as_lines(targets_of(once))


def test_evaluate_of_an_ensemble(cli_model, other_cli_model, files, tmp_path):
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1]]
    execute(evaluate, [*words, "--ensemble", other_cli_model, "--output", str(tmp_path / "m.json")])
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    together = Generator.from_pretrained([cli_model, other_cli_model], device="cpu").generate(SOURCES)
    assert result["scores"]["bleu"]["score"] == pytest.approx(BLEU().corpus_score(together, [TARGETS]).score)
    assert result["inference"]["models"] == 2 and "loss" not in result


@pytest.mark.parametrize(
    "words", [["--dtype", "bfloat16"], ["--ensemble", "MODEL"], ["--max_source_length", "9"], ["--use_vmap"]], ids=str
)
def test_scores_of_another_model_than_the_saved_one_stay_out_of_its_folder(words, files, tmp_path, monkeypatch):
    generator = tiny_generator()
    folder = save_generator(generator, tmp_path / "model")
    tokens = generator.tokenizers.target.get_vocab()
    (folder / "vmap.txt").write_text("\t" + " ".join(tokens) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = [str(folder) if word == "MODEL" else word for word in words]
    execute(evaluate, [str(folder), "--device", "cpu", "--source", files[0], "--target", files[1], *words])
    assert not (folder / "metrics.json").exists()
    assert json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))["num_examples"] == 5


@pytest.fixture
def scored_folder(files, tmp_path, monkeypatch):
    """A model with scores of its own, beside the current folder; and the words that measured them."""
    folder = save_generator(tiny_generator(), tmp_path / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = [str(folder), "--device", "cpu", "--metrics", "chrf", "--source", files[0], "--target"]
    execute(evaluate, [*words, files[1]])
    return folder, [*words, files[1]]


def test_evaluate_again_replaces_what_it_measured(scored_folder):
    folder, words = scored_folder
    earlier = (folder / "metrics.json").read_text(encoding="utf-8")
    assert json.loads(earlier)["scores"].keys() == {"chrf"}
    execute(evaluate, [*words, "--metrics", "bleu", "chrf", "--bleu_tokenize", "none", "--lowercase"])
    scores = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["scores"]
    assert scores.keys() == {"bleu", "chrf"}
    assert "case:lc" in scores["bleu"]["signature"] and "tok:none" in scores["bleu"]["signature"]
    assert not Path("metrics.json").exists()


@pytest.mark.parametrize(
    "words", [["--target", "TURNED"], ["--num_beams", "2"], ["--source_prefix", "a "], ["--length_penalty", "2.5"]]
)
def test_scores_of_other_pairs_or_settings_stay_in_the_folder(words, scored_folder, files, tmp_path, caplog):
    folder, same = scored_folder
    earlier = (folder / "metrics.json").read_text(encoding="utf-8")
    (tmp_path / "other").mkdir()
    turned = tmp_path / "other" / "test.de"
    turned.write_text("\n".join(reversed(TARGETS)), encoding="utf-8")
    words = [str(turned) if word == "TURNED" else word for word in words]
    execute(evaluate, [*same, *words])
    assert (folder / "metrics.json").read_text(encoding="utf-8") == earlier
    assert json.loads(Path("metrics.json").read_text(encoding="utf-8"))["num_examples"] == 5
    assert (
        f"{folder}/metrics.json has scores of the training run, or of other pairs or settings, and is kept"
        in caplog.text
    )
    execute(evaluate, [*same, *words, "--output", str(folder)])
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


def test_scores_that_are_not_the_models_do_not_become_so_from_within_its_folder(scored_folder, monkeypatch):
    folder, words = scored_folder
    earlier = (folder / "metrics.json").read_text(encoding="utf-8")
    monkeypatch.chdir(folder)
    for more in (["--num_beams", "2"], ["--dtype", "bfloat16"]):
        with pytest.raises(ValueError, match="`output` must be given in a model's folder, got None"):
            execute(evaluate, [*words, *more])
    assert (folder / "metrics.json").read_text(encoding="utf-8") == earlier


def test_settings_that_cannot_be_written_are_found_before_decoding(cli_model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(Generator, "generate", refuse)
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1], "--output", str(tmp_path)]
    with pytest.raises(ValueError, match="`metrics` must hold finite numbers"):
        execute(evaluate, [*words, "--length_penalty", "inf"])


def test_evaluate_joins_references_but_not_predictions(files, tmp_path):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    pieces = tmp_path / "pieces.de"
    pieces.write_text("\n".join(PIECES), encoding="utf-8")
    results, output = [], tmp_path / "m.json"
    words_of_all = [str(folder), "--device", "cpu", "--source", files[0], "--metrics", "chrf", "--output", str(output)]
    for words in (["--target", files[1]], ["--target", str(pieces), "--joiner", "@@"], ["--target", str(pieces)]):
        execute(evaluate, [*words_of_all, *words])
        results.append(json.loads(output.read_text(encoding="utf-8")))
    assert results[0]["scores"] == results[1]["scores"] and results[0]["loss"] == results[1]["loss"]
    assert results[2]["loss"] != results[0]["loss"]


@pytest.mark.parametrize("words", [[], ["--joiner", "@@"]], ids=str)
def test_loss_of_a_pretokenized_model_is_of_its_pieces(words, files, tmp_path):
    generator = tiny_generator(kind="pretokenized")
    folder = save_generator(generator, tmp_path / "model")
    pieces = tmp_path / "pieces.de"
    pieces.write_text("\n".join(PIECES), encoding="utf-8")
    execute(evaluate, [str(folder), "--device", "cpu", "--source", files[0], "--target", str(pieces), *words])
    result = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    expected, _ = evaluate_generator(generator, SOURCES, PIECES, metrics=["bleu", "chrf"])
    assert result["loss"] == pytest.approx(expected["loss"]) and result["scores"] == expected["scores"]


def test_evaluate_reads_files_as_training_does(cli_model, files, tmp_path, capsys):
    words = [cli_model, "--device", "cpu", "--metrics", "chrf", "--output", str(tmp_path / "m.json")]
    execute(evaluate, [*words, "--source", files[0], "--target", files[1]])
    expected = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    rows = [
        f"{number}\t{target}\t{source}" for number, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True))
    ]
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


def refuse(*args, **kwargs):
    pytest.fail("Work has begun.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--metrics", "blue"], "A name in `metrics` must be one of bleu, .*, got 'blue'. Did you mean 'bleu'?"),
        (["--bleu_tokenize", "nosuch"], "`bleu_tokenize` must be one of none, .*, got 'nosuch'."),
        (
            ["--metrics", "chrf", "--bleu_tokenize", "none"],
            "`metrics` must hold bleu with `bleu_tokenize`, got .*chrf.*",
        ),
        (
            ["--metrics", "ter", "rouge", "--lowercase"],
            "`metrics` must hold a score that depends on case with `lowercase`",
        ),
        (["--source_column", "zz"], "`file` must be given with `source_column`, got None and 'zz'"),
        (["--target_column", "1"], "`file` must be given with `target_column`, got None and 1"),
        (["--predictions", "FOLDER"], "`predictions` must be a file, got the folder "),
        (["--predictions", "FOLDER/new/"], "`predictions` must be a file, got the folder .*new/"),
        (["--output", "FOLDER/test.en/m.json"], "`output` must be in a folder that can be written to, got .*m.json: "),
        (["--output", "FOLDER/taken"], "`output` must be a file, or a folder for metrics.json, got .*metrics.json"),
    ],
    ids=str,
)
def test_evaluate_finds_mistakes_before_any_work(words, said, cli_model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(Generator, "from_pretrained", refuse)
    (tmp_path / "taken" / "metrics.json").mkdir(parents=True)
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    with pytest.raises(ValueError, match=said):
        execute(evaluate, [cli_model, "--source", files[0], "--target", files[1], *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--predictions", "test.de"], "`predictions` must be another file than `target`, got 'test.de' for both"),
        (["--output", "test.en"], "`output` must be another file than `source`, got 'test.en' for both"),
        (["--output", "link"], "`output` must be another file than `target`, got 'link' for both"),
        (["--output", "m.json", "--predictions", "./m.json"], "`predictions` must be another file than `output`"),
        (["--output", "./", "--predictions", "metrics.json"], "`predictions` must be another file than `output`"),
    ],
    ids=str,
)
def test_evaluate_writes_over_nothing_that_it_reads(words, said, cli_model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(Generator, "from_pretrained", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("test.de")
    with pytest.raises(ValueError, match=said):
        execute(evaluate, [cli_model, "--source", files[0], "--target", files[1], *words])
    (tmp_path / "test.tsv").write_text("a cat\teine Katze\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"`predictions` must be another file than `file`, got 'test.tsv' for both"):
        execute(evaluate, [cli_model, "--file", "test.tsv", "--output", "m.json", "--predictions", "test.tsv"])
    assert [Path(path).read_text(encoding="utf-8").splitlines() for path in files] == [SOURCES, TARGETS]


def test_evaluate_finds_a_folder_that_it_cannot_write_to_before_any_work(files, tmp_path, monkeypatch):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    make_file = tempfile.TemporaryFile

    def refuse_there(*args, dir=None, **kwargs):
        if dir == folder:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), dir)
        return make_file(*args, dir=dir, **kwargs)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse_there)
    words = [str(folder), "--device", "cpu", "--source", files[0], "--target", files[1], "--metrics", "chrf"]
    execute(evaluate, [*words, "--output", str(tmp_path)])
    assert (tmp_path / "metrics.json").is_file()
    monkeypatch.setattr(Generator, "from_pretrained", refuse)
    with pytest.raises(ValueError, match=r"`output` must be in a folder .*, got .*model/metrics.json: .*Read-only"):
        execute(evaluate, words)


def test_evaluate_keeps_predictions_when_it_cannot_decode_or_score(cli_model, files, tmp_path, monkeypatch):
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1], "--output", str(tmp_path)]
    predictions, older = tmp_path / "p.txt", ["an older target"]
    predictions.write_text("an older target\n", encoding="utf-8")
    for place, name, expected in ((Generator, "generate", older), (evaluation, "compute_metrics", None)):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(place, name, lambda *_, **__: 1 / 0)
            execute(evaluate, [*words, "--predictions", str(predictions)])
        assert predictions.read_text(encoding="utf-8").split("\n")[:-1] == (expected or as_lines(targets_of(SOURCES)))


def test_scores_of_a_model_that_diverged_are_written(files, tmp_path, caplog):
    folder = save_generator(diverged_generator(), tmp_path / "model")
    with caplog.at_level("INFO"):
        execute(evaluate, [str(folder), "--device", "cpu", "--source", files[0], "--target", files[1]])
    result = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert result["loss"] is None and result["perplexity"] is None and result["scores"].keys() == {"bleu", "chrf"}
    assert "The loss must be a finite number, got nan. It is written as null." in caplog.text
    assert "Written to" in caplog.text


def test_evaluate_makes_the_folder_of_predictions_before_any_work(cli_model, files, tmp_path, monkeypatch):
    words = [cli_model, "--device", "cpu", "--source", files[0], "--target", files[1]]
    words += ["--output", str(tmp_path / "m.json"), "--predictions", str(tmp_path / "new" / "place" / "p.txt")]
    execute(evaluate, words)
    assert len((tmp_path / "new" / "place" / "p.txt").read_text(encoding="utf-8").splitlines()) >= len(SOURCES)
    monkeypatch.setattr(Generator, "from_pretrained", refuse)
    with pytest.raises(OSError, match=r"m.json"):
        execute(evaluate, [*words[:-1], str(tmp_path / "m.json" / "p.txt")])

import contextlib
import sys
from unittest.mock import Mock

import pytest
from cli_texts import contents
from huggingface_hub.errors import RepositoryNotFoundError
from subcommands import execute
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator

import metaphrase
from metaphrase.scripts import __main__ as command_line
from metaphrase.scripts import tokenize, train
from metaphrase.scripts.parsers import SUBCOMMANDS, parse
from metaphrase.tokenization import TokenizerPair, train_tokenizer


def test_tokenize_trains_one_tokenizer(files, tmp_path):
    options = ["--vocab_size", "300", "--kind", "byte_bpe", "--additional_special_tokens", "<2de>"]
    execute(tokenize, ["--files", *files, "--output", str(tmp_path / "t"), *options])
    pair = TokenizerPair.from_pretrained(tmp_path / "t")
    given = {"vocab_size": 300, "additional_special_tokens": ["<2de>"]}
    expected = train_tokenizer(SOURCES + TARGETS, show_progress=False, **given)
    assert pair.is_joint and pair.source.get_vocab() == expected.get_vocab() and "<2de>" in expected.get_vocab()


def test_tokenize_trains_one_for_each_side(files, tmp_path):
    words = ["--source_files", files[0], "--target_files", files[1], "--kind", "char", "--lowercase"]
    execute(tokenize, [*words, "--target_kind", "word", "--output", str(tmp_path / "t")])
    pair = TokenizerPair.from_pretrained(tmp_path / "t")
    assert not pair.is_joint and len(pair.source) == 260
    assert pair.target.tokenize("Hund läuft") == ["Ġhund", "ĠlÃ¤uft"]
    with pytest.raises(ValueError, match="`target_kind` must be left out when `joint` is true, got 'word'"):
        execute(tokenize, ["--files", *files, "--target_kind", "word", "--output", str(tmp_path / "joint")])


def test_tokenize_replaces_a_tokenizer_and_never_a_model(files, tmp_path):
    folder, model = tmp_path / "t", save_generator(tiny_generator(), tmp_path / "model")
    sides = ["--source_files", files[0], "--target_files", files[1]]
    execute(tokenize, [*sides, "--kind", "char", "--output", str(folder)])
    before = contents(folder), contents(model)
    words = ["--files", *files, "--kind", "char", "--output"]
    with pytest.raises(ValueError, match=r"`output` must not exist, got .*t. Pass --overwrite to replace it"):
        execute(tokenize, [*words, str(folder)])
    with pytest.raises(ValueError, match=r"`output` must hold only the files that tokenization.json lists"):
        execute(tokenize, [*words, str(model), "--overwrite"])
    assert (contents(folder), contents(model)) == before
    # A joint tokenizer leaves nothing of a separate pair behind.
    execute(tokenize, [*words, str(folder), "--overwrite"])
    assert TokenizerPair.from_pretrained(folder).is_joint and not (folder / "target_tokenizer").exists()


def run_command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["metaphrase", *words])
    return command_line.main()


NO_MODEL = "must be a folder that exists, or a name on the Hub, got "


# Mistakes that the parser finds, and those that a subcommand finds.
PLAIN = [
    *((f"generate {name}", f"`model` {NO_MODEL}'{name}'.") for name in ("./none", "some/where/else", "~/none", "full")),
    ("convert /none out", f"`source` {NO_MODEL}'/none'."),
    ("export ./none out --format onnx", f"`model` {NO_MODEL}'./none'."),
    ("generate some/model --output full", "`output` must be a new file, got 'full'. Pass --overwrite"),
    ("push runs my-model", "`repo_id` must be user/name or organization/name, got 'my-model'."),
    ("serve x --port http", "must be a whole number of at least 0, got 'http'"),
    ("demo pairs.tsv", "unrecognized arguments: pairs.tsv"),
    ("evaluate --metrics bleu demo", "the following arguments are required: model"),
    ("attention x --layer last", "must be a whole number or mean, got 'last'"),
    ("generate x --num_beams many", "`num_beams`: invalid int value: 'many'."),
    ("generate x --early_stopping perhaps", "`early_stopping` must be true or false, got 'perhaps'."),
    ("tokenize --outpu x", "unknown option --outpu. Did you mean '--output'?"),
    ("generate x --xyzzy", "unknown option --xyzzy. See `metaphrase generate --help`."),
    ("genrate", "got 'genrate'. Did you mean 'generate'?"),
]
LATE = [
    ("train none.tsv", "`train_file` must be a file, got none.tsv: no such file."),
    ("train full none.de", "`train_target_file` must be a file, got none.de: no such file."),
    ("train demo --num-train-epochss 3", "got `num_train_epochss` in the command line. Did you mean"),
    ("train --dry_run demo --resume demo", "unrecognized arguments: demo"),
    ("train", "Give a file: metaphrase train pairs.tsv."),
    *((f"tokenize {words} --output t", "Either `--files`, or both") for words in ("", "--source_files full")),
    ("tokenize --files full --source_files full --target_files full --output t", "Either `--files`, or both"),
]


@pytest.mark.parametrize(("words", "said"), [*PLAIN, *LATE])
def test_mistakes_are_one_line_and_plain_ones_load_nothing(words, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "full").write_text("a cat\n", encoding="utf-8")
    if (words, said) in PLAIN:
        load = Mock(side_effect=AssertionError("torch is loaded"))
        monkeypatch.setattr(command_line.importlib, "import_module", load)
    assert run_command(monkeypatch, *words.split()) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1 and not (tmp_path / "t").exists()


def test_words_after_a_name_that_may_be_on_the_hub_or_two_dashes_are_values():
    assert parse("explain", ["runs", "--source", "a"]).model == "runs"
    assert parse("average", ["--output", "a", "--", "--odd"]).folders == ["--odd"]
    for words in ("demo --dry-run --resume", "--dry_run --resume demo"):
        arguments = parse("train", [*words.split(), "--seed", "7", "--model.hidden_size=8"])
        assert arguments.recipe == ["demo"] and arguments.dry_run and arguments.resume
        assert arguments.fields == ["--seed", "7", "--model.hidden_size=8"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no network"), "a name on the Hub, got 'some/model': no network"),
        (RepositoryNotFoundError("not there", response=Mock()), "not there"),
    ],
    ids=["no network", "no model"],
)
def test_the_hub_is_asked_once_for_a_model_that_cannot_be_loaded(error, reason, monkeypatch, capsys):
    calls = []

    def fail(url, **options):
        calls.append(url)
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("metaphrase.storage.loading.get_hf_file_metadata", fail)
    assert run_command(monkeypatch, "generate", "some/model") == 2
    said = capsys.readouterr().err
    assert said.startswith("metaphrase generate: error: ") and said.count("\n") == 1 and reason in said
    assert len(calls) == 1 and calls[0].endswith("/some/model/resolve/main/config.json")


@pytest.mark.parametrize("word", ["--quiet", "--verbose"])
def test_errors_are_a_line_or_a_traceback(word, monkeypatch, capsys):
    monkeypatch.setattr(train, "main", Mock(side_effect=ValueError("`x` must be y.")))
    with pytest.raises(ValueError) if word == "--verbose" else contextlib.nullcontext():
        assert command_line.run("train", [word]) == 2
    assert capsys.readouterr().err == "metaphrase train: error: `x` must be y.\n"


def test_no_subcommand_help_and_version(monkeypatch, capsys):
    assert run_command(monkeypatch, "xyzzy") == 2
    assert "Did you mean" not in capsys.readouterr().err
    assert run_command(monkeypatch) == 2
    assert run_command(monkeypatch, "--help") == 0
    assert run_command(monkeypatch, "--version") == 0
    said, _, version = capsys.readouterr().out.rstrip().rpartition("\n")
    assert version == f"metaphrase {metaphrase.__version__}"
    assert said.startswith("usage: metaphrase SUBCOMMAND") and all(f"  {name} " in said for name in SUBCOMMANDS)

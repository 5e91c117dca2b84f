"""The command line: verbs in this process on tiny models, and one of them as a file."""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator

from metaphrase.inference import Generator, cross_attentions, format_pharaoh, word_alignment
from metaphrase.scripts import __main__ as command_line
from metaphrase.scripts import attention, evaluate, generate, tokenize
from metaphrase.scripts.console import run
from metaphrase.tokenization import TokenizerPair, train_tokenizer

SCRIPTS = Path(generate.__file__).parent
# Line feeds alone part lines: the characters that Python takes for line ends too are inside them.
ODD_LINES = ["a small\u2028dog runs", "the cat\rsleeps", "a\x85cat\x0b\x0c", "", " \t", "the dog\u2029"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_generator(tiny_generator(kind="byte"), tmp_path_factory.mktemp("cli") / "model"))


def targets_of(texts, **options):
    return tiny_generator(kind="byte").generate(texts, **options)


def as_lines(texts):
    return [text.replace("\r", " ").replace("\n", " ") for text in texts]


def run_generate(model, text, monkeypatch, *options):
    """The lines that `generate` writes for bytes on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        generate.main([model, "--device", "cpu", *options])
    assert output.getvalue() == "" or output.getvalue().endswith("\n")
    return output.getvalue().split("\n")[:-1]


@pytest.fixture
def files(tmp_path):
    source, target = tmp_path / "test.en", tmp_path / "test.de"
    source.write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
    target.write_text("\n".join(TARGETS) + "\n", encoding="utf-8")
    return str(source), str(target)


# generate


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
@pytest.mark.parametrize("window", ["1", "4", "100"])
def test_generate_writes_a_line_for_each_line(model, monkeypatch, window, end):
    text = ((end or "\n").join(ODD_LINES[:5]) + end).encode()
    lines = run_generate(model, text, monkeypatch, "--window", window)
    assert lines == as_lines(targets_of(ODD_LINES[:5])) and lines[3:] == ["", ""] and "" not in lines[:3]


def test_generate_reads_and_writes_files(model, tmp_path, monkeypatch):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes("\n".join(ODD_LINES).encode())
    generate.main([model, "--device", "cpu", "--input", str(source), "--output", str(target)])
    written = target.read_bytes().decode().split("\n")
    assert written == [*as_lines(targets_of(ODD_LINES)), ""]
    assert run_generate(model, source.read_bytes(), monkeypatch) == written[:-1]
    assert run_generate(model, b"\xef\xbb\xbf" + source.read_bytes(), monkeypatch) == written[:-1]


def test_generate_of_nothing_writes_nothing(model, monkeypatch):
    assert run_generate(model, b"", monkeypatch) == []
    assert run_generate(model, b"\n\n", monkeypatch) == ["", ""]


def test_line_breaks_of_the_model_do_not_become_lines(model, monkeypatch):
    monkeypatch.setattr(
        "metaphrase.tokenization.TokenizerPair.decode_targets", lambda self, ids: ["a\nb\r\nc"] * len(ids)
    )
    assert run_generate(model, b"the cat\nthe dog\n", monkeypatch) == ["a b  c"] * 2


def test_generate_n_best(model, monkeypatch):
    options = ["--num_beams", "3", "--num_return_sequences", "3"]
    lines = run_generate(model, ("\n".join(SOURCES) + "\n\n").encode(), monkeypatch, *options)
    rows = [line.split(" ||| ") for line in lines]
    assert [row[0] for row in rows] == [str(index) for index in range(6) for _ in range(3)]
    for index, best in enumerate(as_lines(targets_of(SOURCES, num_beams=3))):
        scores = [float(row[-1]) for row in rows[3 * index : 3 * index + 3]]
        assert " ||| ".join(rows[3 * index][1:-1]) == best and scores == sorted(scores, reverse=True) and scores[0] < 0
    assert lines[-3:] == ["5 |||  ||| 0.000000"] * 3
    single = run_generate(model, b"the cat\n", monkeypatch, "--n_best")
    assert len(single) == 1 and single[0].startswith("0 ||| ")


def test_generate_takes_phrases_and_the_searches_that_transformers_dropped(model, monkeypatch):
    text = ("\n".join(SOURCES) + "\n").encode()
    for words, options in (
        (
            ["--must_contain", "ab", "cd", "--never_contain", "e"],
            {"must_contain": [["ab", "cd"]], "never_contain": ["e"]},
        ),
        (["--penalty_alpha", "0.6", "--top_k", "4"], {"penalty_alpha": 0.6, "top_k": 4}),
        (
            ["--num_beams", "4", "--num_beam_groups", "2", "--diversity_penalty", "1"],
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        ),
    ):
        assert run_generate(model, text, monkeypatch, *words) == as_lines(targets_of(SOURCES, **options))


def test_several_targets_by_the_models_own_settings_are_still_one_line(tmp_path, monkeypatch):
    generator = tiny_generator()
    generator.model.generation_config.update(num_beams=2, num_return_sequences=2)
    folder = str(save_generator(generator, tmp_path))
    assert len(run_generate(folder, b"the cat\n\na cat\n", monkeypatch)) == 3
    assert len(run_generate(folder, b"the cat\n\na cat\n", monkeypatch, "--n_best")) == 6


def test_sampling_follows_the_seed(model, monkeypatch):
    text = "\n".join(SOURCES).encode()
    first, again, other = (
        run_generate(model, text, monkeypatch, "--temperature", "3", "--seed", seed) for seed in ("1", "1", "2")
    )
    assert first == again != other


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return str(save_generator(tiny_generator(kind="byte", seed=1), tmp_path_factory.mktemp("cli") / "other"))


def test_an_ensemble_writes_what_its_generator_does(model, other_model, monkeypatch):
    text = "\n".join(SOURCES).encode()
    for mean in ("linear", "log_linear"):
        lines = run_generate(model, text, monkeypatch, "--ensemble", other_model, "--ensemble_mean", mean)
        together = Generator.from_pretrained([model, other_model], device="cpu", ensemble_mean=mean)
        assert lines == as_lines(together.generate(SOURCES)) != as_lines(targets_of(SOURCES))


def test_an_assistant_changes_nothing_and_what_it_was_right_in_is_reported(model, other_model, monkeypatch, caplog):
    text, plain = "\n".join(SOURCES).encode(), as_lines(targets_of(SOURCES))
    assert run_generate(model, text, monkeypatch, "--assistant_model", other_model) == plain
    caplog.set_level("INFO")
    options = ["--assistant_model", model, "--num_assistant_tokens", "1"]
    assert run_generate(model, text, monkeypatch, *options) == plain
    assert re.search(r"Of \d+ drafted tokens 100\.0 % were accepted", caplog.text)


def test_minimum_bayes_risk_writes_what_its_generator_does(model, monkeypatch):
    text = ("\n".join(SOURCES) + "\n\n").encode()
    options = {"num_beams": 4, "num_candidates": 4}
    expected = tiny_generator(kind="byte").generate_mbr([*SOURCES, ""], utility="bleu", **options)
    words = ["--num_beams", "4", "--mbr_candidates", "4", "--mbr_utility", "bleu", "--window", "2"]
    assert run_generate(model, text, monkeypatch, *words) == as_lines([scored.text for scored in expected])
    rows = run_generate(model, text, monkeypatch, *words, "--n_best")
    # The windows are other batches.
    scores = [float(row.split(" ||| ")[-1]) for row in rows]
    assert scores == pytest.approx([scored.score for scored in expected], abs=1e-3)
    sampled = [run_generate(model, text, monkeypatch, "--mbr_candidates", "3", "--seed", seed) for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2] and len(sampled[0]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mbr_utility", "bleu"], "`mbr_candidates` must be given with `mbr_utility`, got None and 'bleu'"),
        (["--mbr_references", "3"], "`mbr_candidates` must be given with `mbr_references`, got None and 3"),
        (
            ["--num_assistant_tokens", "3"],
            "`assistant_model` must be given with `num_assistant_tokens`, got None and 3",
        ),
    ],
)
def test_options_that_need_another_are_refused_without_it(model, words, message):
    with pytest.raises(ValueError, match=message):
        generate.main([model, *words])


def test_unfinished_targets_are_reported(model, monkeypatch, caplog):
    text = ("\n".join(SOURCES) + "\n").encode()
    run_generate(model, text, monkeypatch, "--max_new_tokens", "2")
    assert "5 targets of 5 sources met the length limit before their end" in caplog.text


@pytest.mark.parametrize("by_file", [True, False])
def test_bytes_that_are_no_text_are_named_by_their_line(model, tmp_path, monkeypatch, capsys, by_file):
    (tmp_path / "in").write_bytes(b"a cat\nthe d\xffog\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "in").read_bytes())))
    words = [model, "--device", "cpu", *(["--input", str(tmp_path / "in")] if by_file else [])]
    assert run(generate.main, "generate", words) == 2
    assert "must be UTF-8, but line 2" in capsys.readouterr().err


def test_mistakes_do_not_empty_the_output(model, tmp_path):
    written = tmp_path / "out"
    written.write_text("a cat\n", encoding="utf-8")
    with pytest.raises(ValueError, match="`output` must be another file than `input`"):
        generate.main([model, "--input", str(written), "--output", str(written)])
    with pytest.raises(FileNotFoundError):
        generate.main([model, "--input", str(tmp_path / "none"), "--output", str(written)])
    assert written.read_text(encoding="utf-8") == "a cat\n"


# evaluate


def test_evaluate_writes_scores_and_predictions(model, files, tmp_path):
    words = [model, "--device", "cpu", "--source", files[0], "--target", files[1], "--num_beams", "2"]
    evaluate.main([*words, "--output", str(tmp_path / "m.json"), "--predictions", str(tmp_path / "p.txt")])
    predictions = (tmp_path / "p.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert predictions == as_lines(targets_of(SOURCES, num_beams=2))
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    expected = BLEU().corpus_score(targets_of(SOURCES, num_beams=2), [TARGETS]).score
    assert result["scores"]["bleu"]["score"] == pytest.approx(expected)
    assert result["scores"].keys() == {"bleu", "chrf"} and "tok:13a" in result["scores"]["bleu"]["signature"]
    assert result["generation"]["num_beams"] == 2 and result["num_examples"] == 5
    assert result["data"] == {"name": "test.en"}


def test_evaluate_of_an_ensemble(model, other_model, files, tmp_path, capsys):
    words = [model, "--device", "cpu", "--source", files[0], "--target", files[1]]
    evaluate.main([*words, "--ensemble", other_model, "--output", str(tmp_path / "m.json")])
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    together = Generator.from_pretrained([model, other_model], device="cpu").generate(SOURCES)
    assert result["scores"]["bleu"]["score"] == pytest.approx(BLEU().corpus_score(together, [TARGETS]).score)
    assert result["inference"]["models"] == 2 and "loss" not in result
    assert run(evaluate.main, "evaluate", [*words, "--ensemble_mean", "linear"]) == 2
    assert "`ensemble` must be given with `ensemble_mean`, got None and 'linear'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--dtype", "bfloat16"], ["--ensemble", "MODEL"]], ids=str)
def test_scores_of_another_model_than_the_saved_one_stay_out_of_its_folder(words, files, tmp_path, monkeypatch):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    (folder / "metrics.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = [str(folder) if word == "MODEL" else word for word in words]
    evaluate.main([str(folder), "--device", "cpu", "--source", files[0], "--target", files[1], *words])
    assert (folder / "metrics.json").read_text(encoding="utf-8") == "{}"
    assert json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))["num_examples"] == 5


def test_evaluate_options_reach_the_metrics_and_the_folder(files, tmp_path):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    pair = ["--source", files[0], "--target", files[1]]
    evaluate.main(
        [str(folder), "--device", "cpu", *pair, "--metrics", "bleu", "--bleu_tokenize", "none", "--lowercase"]
    )
    result = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert "case:lc" in result["scores"]["bleu"]["signature"] and "tok:none" in result["scores"]["bleu"]["signature"]


def test_evaluate_joins_references_but_not_predictions(files, tmp_path):
    folder = save_generator(tiny_generator(), tmp_path / "model")
    pieces = tmp_path / "pieces.de"
    pieces.write_text("\n".join(target[:2] + "@@ " + target[2:] for target in TARGETS) + "\n", encoding="utf-8")
    results = []
    for words in (["--target", files[1]], ["--target", str(pieces), "--joiner", "@@"], ["--target", str(pieces)]):
        evaluate.main([str(folder), "--device", "cpu", "--source", files[0], *words, "--metrics", "chrf"])
        results.append(json.loads((folder / "metrics.json").read_text(encoding="utf-8")))
    assert results[0]["scores"] == results[1]["scores"] and results[0]["loss"] == results[1]["loss"]
    assert results[2]["loss"] != results[0]["loss"]


def test_evaluate_names_what_is_missing(model, files, capsys):
    assert run(evaluate.main, "evaluate", [model, "--source", files[0]]) == 2
    assert "target_file" in capsys.readouterr().err


# tokenize


def test_tokenize_trains_one_tokenizer(files, tmp_path):
    options = ["--vocab_size", "300", "--kind", "byte_bpe", "--additional_special_tokens", "<2de>"]
    tokenize.main(["--files", *files, "--output", str(tmp_path / "t"), *options])
    pair = TokenizerPair.from_pretrained(tmp_path / "t")
    expected = train_tokenizer(
        SOURCES + TARGETS, vocab_size=300, additional_special_tokens=["<2de>"], show_progress=False
    )
    assert pair.is_joint and pair.source.get_vocab() == expected.get_vocab() and "<2de>" in expected.get_vocab()


def test_tokenize_trains_one_for_each_side(files, tmp_path):
    words = ["--source_files", files[0], "--target_files", files[1], "--kind", "char", "--lowercase"]
    tokenize.main([*words, "--output", str(tmp_path / "t")])
    pair = TokenizerPair.from_pretrained(tmp_path / "t")
    assert not pair.is_joint and "ä" in pair.target.get_vocab() and "ä" not in pair.source.get_vocab()
    assert "H" not in pair.target.get_vocab()


@pytest.mark.parametrize("sides", [(), ("source",), ("target",), ("files", "source"), ("files", "source", "target")])
def test_tokenize_wants_one_way_of_naming_files(sides, files, tmp_path):
    named = {"files": "--files", "source": "--source_files", "target": "--target_files"}
    words = [word for side in sides for word in (named[side], files[0])]
    with pytest.raises(ValueError, match="Either `--files`, or both"):
        tokenize.main([*words, "--output", str(tmp_path / "t")])
    assert not (tmp_path / "t").exists()


# attention


def test_attention_draws_a_picture(model, tmp_path, caplog):
    caplog.set_level("INFO")
    pictures = {}
    for name, words in {"all": [], "last": ["--layer", "-1"], "head": ["--layer", "0", "--head", "1"]}.items():
        path = tmp_path / f"{name}.png"
        attention.main(
            [model, "--device", "cpu", "--source", "the cat", "--target", "die $x$", "--output", str(path), *words]
        )
        pictures[name] = path.read_bytes()
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values()) and len(set(pictures.values())) == 3
    assert "Target: die $x$" in caplog.text


def test_attention_generates_a_target(model, tmp_path, caplog):
    caplog.set_level("INFO")
    words = [
        model,
        "--device",
        "cpu",
        "--source",
        SOURCES[0],
        "--output",
        str(tmp_path / "a.png"),
        "--max_new_tokens",
        "3",
    ]
    attention.main(words)
    assert f"Target: {targets_of(SOURCES[:1], max_new_tokens=3)[0]}" in caplog.text
    assert "met the length limit" in caplog.text


def test_attention_writes_a_page_of_several_sentences(model, tmp_path, caplog):
    source, page = tmp_path / "source.txt", tmp_path / "page.html"
    source.write_text("the cat <b>\n\ntwo dogs\n", encoding="utf-8")
    words = [model, "--device", "cpu", "--input", str(source), "--max_new_tokens", "4", "--layer", "1"]
    attention.main([*words, "--output", str(page)])
    text = page.read_text(encoding="utf-8")
    assert text.count("<section") == 2 and "&lt;b&gt;</button>" in text and "<b>" not in text.split("<main>")[0]
    assert "1 of 3 sources are empty and are left out" in caplog.text
    again = tmp_path / "again"
    attention.main([*words, "--format", "html", "--output", str(again)])
    assert again.read_text(encoding="utf-8") == text


def test_attention_writes_links(model, tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level("INFO")
    files = {"source": [*SOURCES[:2], "", SOURCES[2]], "target": [*TARGETS[:2], "", TARGETS[2]]}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    words = [model, "--device", "cpu", "--layer", "-1", "--target_input", str(tmp_path / "target")]
    attention.main([*words, "--input", str(tmp_path / "source"), "--output", str(tmp_path / "words.align")])
    maps = cross_attentions(
        tiny_generator(kind="byte"), *([*side[:2], side[2]] for side in (SOURCES, TARGETS)), layer=-1
    )
    expected = [format_pharaoh(word_alignment(given)) for given in maps]
    expected.insert(2, "")
    assert (tmp_path / "words.align").read_text(encoding="utf-8").splitlines() == expected
    assert all(re.fullmatch(r"[0-9]+-[0-9]+( [0-9]+-[0-9]+)+", line) for line in expected if line)
    assert "1 of 4 sources are empty and have an empty line" in caplog.text and "Target:" not in caplog.text
    # The same from standard input to standard output, in small parts.
    monkeypatch.setattr(attention, "SENTENCES_AT_A_TIME", 2)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "source").read_bytes())))
    attention.main([*words, "--format", "pharaoh"])
    assert capsys.readouterr().out.splitlines() == expected
    attention.main([model, "--device", "cpu", "--source", "a", "--source", "the", "--format", "pharaoh"])
    assert len(capsys.readouterr().out.splitlines()) == caplog.text.count("Target: ") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--source", "a", "--output", "x.pdf"],
            "`output` must end in one of .png, .html, .htm, .align, .txt where no",
        ),
        (["--source", "a", "--source", "b"], "A picture must show one sentence, got 2"),
        (["--source", " "], "A picture must show one sentence, got 0"),
        (["--source", " ", "--format", "html"], "A page must show 1 to 500 sentences, got 0"),
        (["--source", "a", "--input", __file__], "`source` must be given as text or as a file, got both: 'a' and "),
        (["--source", "a", "--target", "b", "--target_input", __file__], "`target` must be given as text or as a file"),
        (
            ["--source", "a", "--target", "b", "--target", "c"],
            "`source` and `target` must be equally many, got 1 and 2",
        ),
        (["--source", "a", "--target", "b", "--num_beams", "2"], "`target` must be left out for the model to generate"),
    ],
)
def test_attention_refuses(model, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(attention.main, "attention", [model, "--device", "cpu", *words]) == 2
    assert f"metaphrase attention: error: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_attention_of_a_layer_that_is_not_there(model, capsys):
    assert run(attention.main, "attention", [model, "--device", "cpu", "--source", "the cat", "--layer", "2"]) == 2
    assert "metaphrase attention: error: `layer` must be from -2 to 1, got 2" in capsys.readouterr().err


# all verbs


def run_command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["metaphrase", *words])
    return command_line.main()


def test_verbs_are_found_and_their_errors_are_one_line(model, monkeypatch, capsys):
    assert run_command(monkeypatch, "generate", model, "--window", "0") == 2
    assert capsys.readouterr().err == "metaphrase generate: error: `window` must be at least 1, got 0.\n"
    assert run_command(monkeypatch, "push", model, "somebody/tiny", "--dry-run") == 0
    assert "model.safetensors" in capsys.readouterr().out


def test_model_that_is_not_there_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run_command(monkeypatch, "generate", str(tmp_path / "none")) == 2
    said = capsys.readouterr().err
    assert said.startswith("metaphrase generate: error: ") and said.count("\n") == 1 and "none" in said


def test_every_verb_has_its_file():
    assert [verb for verb in command_line.VERBS if not (SCRIPTS / f"{verb}.py").is_file()] == []


def test_unknown_verbs_and_no_verb(monkeypatch, capsys):
    assert run_command(monkeypatch, "genrate") == 2
    assert "got 'genrate'. Did you mean 'generate'?" in capsys.readouterr().err
    assert run_command(monkeypatch, "xyzzy") == 2
    assert "Did you mean" not in capsys.readouterr().err
    assert run_command(monkeypatch) == 2
    assert run_command(monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: metaphrase VERB") and all(f"  {verb} " in said for verb in command_line.VERBS)


@pytest.mark.parametrize("script", [attention, evaluate, generate, tokenize])
def test_unknown_and_shortened_options_are_refused(script, capsys):
    for words in (["model", "--no_such_option"], ["--outpu", "x"]):
        with pytest.raises(SystemExit) as stopped:
            script.main(words)
        assert stopped.value.code == 2
    assert "usage: metaphrase" in capsys.readouterr().err


def test_every_script_takes_its_folder_off_the_path_first():
    for path in SCRIPTS.glob("*.py"):
        if path.stem in ("__init__", "__main__", "console"):
            continue
        _, first, second = ast.parse(path.read_text(encoding="utf-8")).body[:3]
        assert (ast.unparse(first), ast.unparse(second)) == (
            "import sys",
            # Not again where another process imports the file.
            "if __name__ == '__main__' and (not __package__):\n    sys.path.pop(0)",
        ), path


def test_generate_runs_as_a_file(model):
    """`tokenize.py` and `evaluate.py` in the same folder do not hide the modules of these names."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / "generate.py"), model, "--device", "cpu"]
    source = "\n".join(ODD_LINES).encode()
    done = subprocess.run(command, input=source, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "".join(line + "\n" for line in as_lines(targets_of(ODD_LINES)))

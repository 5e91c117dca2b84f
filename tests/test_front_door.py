"""Tests of `import metaphrase`: it registers the models, plugs in the fast code, and leaves the command line quick."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

import metaphrase
from metaphrase.decoding import fast_generation, prepacked_weights
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.modeling.operators import acceleration
from metaphrase.ops import grid_attention, linear_and_dropout
from metaphrase.scripts.parsers.verbs import VERBS

HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "huggingface_hub",
    "numpy",
    "matplotlib",
    "sacrebleu",
    "tqdm",
}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


def test_version_is_that_of_the_distribution():
    assert metaphrase.__version__ == importlib.metadata.version("metaphrase")


def test_fast_code_is_plugged_into_the_network():
    assert acceleration.linear is linear_and_dropout.linear
    assert acceleration.grid.attend is grid_attention.grid_attention
    assert acceleration.encoding.__module__ == prepacked_weights.__name__
    assert MetaphraseForConditionalGeneration._beam_search is fast_generation.search


@pytest.mark.parametrize("libraries", ["metaphrase, transformers", "transformers, metaphrase"])
def test_transformers_loads_the_models_when_it_looks_them_up(libraries):
    code = f"""
import {libraries}, sys
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert "metaphrase" in CONFIG_MAPPING and "metaphrase" in CONFIG_MAPPING.keys()
print("metaphrase.modeling" in sys.modules)
print(transformers.AutoConfig.for_model("metaphrase").__class__.__module__)
"""
    assert run(code).stdout.split() == ["False", "metaphrase.modeling.configuration_metaphrase"]


@pytest.mark.parametrize(
    "room",
    [
        *(pytest.param(room, marks=pytest.mark.slow) for room in ("ops", "modeling", "tokenization", "decoding")),
        "inference",
    ],
)
def test_any_room_may_be_imported_first(room):
    code = f"import metaphrase.{room}; from metaphrase.modeling.operators import acceleration as a; "
    done = run(code + "print(a.linear.__module__, a.encoding.__module__)")
    assert done.stdout.split() == [linear_and_dropout.__name__, prepacked_weights.__name__], done.stderr


def test_import_loads_nothing_heavy():
    """Seconds depend on the machine, so that modules are counted."""
    code = "import metaphrase, sys; print(*sys.modules)"
    assert not HEAVY & set(run(code).stdout.split())


def test_command_answers_before_anything_heavy_is_loaded(tmp_path):
    lines = [[], ["--help"], ["--version"], ["genrate"], ["train", "demo", "--num_train_epochss", "3"]]
    lines += [[verb, word] for verb in VERBS for word in ("--help", "--help_all", "--no_such_option")]
    lines += [["generate", "model", "--input", str(tmp_path / "none")]]
    code = f"""
import sys
from metaphrase.scripts.__main__ import main
for words in {lines}:
    sys.argv = ["metaphrase", *words]
    try:
        main()
    except SystemExit:
        pass
print("loaded:", *sys.modules)
"""
    done = run(code)
    assert not HEAVY & set(done.stdout.partition("loaded:")[2].split()), done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == 3 + len(VERBS) and all(": error: " in line for line in errors)
    assert errors[-1].endswith(f"`input` must be a file that exists, got '{tmp_path / 'none'}'.")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("metaphrase gen", ["generate"]),
        (
            "metaphrase generate --num_",
            ["--num_assistant_tokens", "--num_beams", "--num_processes", "--num_return_sequences"],
        ),
        ("metaphrase train demo --label_sm", ["--label_smoothing_factor"]),
        ("metaphrase export model out --format o", ["onnx"]),
    ],
)
def test_shell_completes_verbs_options_and_fields(line, expected, tmp_path):
    pytest.importorskip("argcomplete")
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "|"}
    variables |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    command = [sys.executable, "-m", "metaphrase.scripts"]
    subprocess.run(command, env=os.environ | variables, capture_output=True, timeout=60)
    answer = (tmp_path / "answer").read_text(encoding="utf-8")
    assert sorted(word.strip() for word in answer.split("|")) == sorted(expected)


def test_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "metaphrase", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"metaphrase {metaphrase.__version__}\n"

"""Tests of `import metaphrase`: it registers the models, plugs in the fast code, and leaves the command line quick."""

import importlib.metadata
import subprocess
import sys

import pytest

import metaphrase
from metaphrase.decoding import fast_generation, prepacked_weights
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.modeling.operators import acceleration
from metaphrase.modeling.stacks import MetaphraseEncoder
from metaphrase.ops import linear_and_dropout
from metaphrase.scripts.parsers import RECIPE_SUBCOMMANDS, SUBCOMMANDS

HEAVY = {"torch", "transformers", "datasets", "tokenizers", "huggingface_hub", "numpy"}
HEAVY |= {"matplotlib", "sacrebleu", "tqdm"}


def run(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600)


def test_version_is_that_of_the_distribution_and_the_package_runs_as_a_module():
    assert run("-m", "metaphrase", "--version").stdout == f"metaphrase {metaphrase.__version__}\n"
    assert metaphrase.__version__ == importlib.metadata.version("metaphrase")


def test_fast_code_is_plugged_into_the_network():
    assert acceleration.linear is linear_and_dropout.linear
    assert MetaphraseEncoder.encode.__module__ == prepacked_weights.__name__
    assert MetaphraseForConditionalGeneration.supports_packing
    assert MetaphraseForConditionalGeneration._beam_search is fast_generation.generate


def test_transformers_loads_the_models_when_it_looks_them_up():
    # Programs that only look a module up must leave the import as it was.
    code = """
import metaphrase, sys
print(*sys.modules)
import importlib.util, transformers
assert importlib.util.find_spec("transformers.models.auto.configuration_auto")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert "metaphrase" in CONFIG_MAPPING and "metaphrase" in CONFIG_MAPPING.keys()
print("metaphrase.modeling" in sys.modules)
print(transformers.AutoConfig.for_model("metaphrase").__class__.__module__)
"""
    first, *lines = run("-c", code).stdout.splitlines()
    # Seconds depend on the machine, so that modules are counted.
    assert not HEAVY & set(first.split())
    assert lines == ["False", "metaphrase.modeling.configuration_metaphrase"]


@pytest.mark.slow
@pytest.mark.parametrize("room", ["ops", "modeling", "tokenization", "decoding", "inference"])
def test_any_room_may_be_imported_first(room):
    code = f"import transformers, metaphrase.{room}; from metaphrase.modeling.operators import acceleration as a; "
    done = run("-c", code + "print(a.linear.__module__)")
    assert done.stdout.split() == [linear_and_dropout.__name__], done.stderr


def test_command_answers_before_anything_heavy_is_loaded(tmp_path):
    lines = [[], ["--help"], ["--version"], ["genrate"]]
    lines += [[subcommand, word] for subcommand in SUBCOMMANDS for word in ("--help", "--help_all")]
    # A field of a recipe is checked by the recipe.
    mistakes = [[subcommand, "--no_such_option"] for subcommand in SUBCOMMANDS if subcommand not in RECIPE_SUBCOMMANDS]
    mistakes += [["generate", "model", "--input", str(tmp_path / "none")]]
    code = f"""
import sys
from metaphrase.scripts.__main__ import main
for words in {lines + mistakes}:
    sys.argv = ["metaphrase", *words]
    try:
        main()
    except SystemExit:
        pass
print("loaded:", *sys.modules)
"""
    done = run("-c", code)
    assert not HEAVY & set(done.stdout.partition("loaded:")[2].split()), done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == 1 + len(mistakes) and all(": error: " in line for line in errors)
    assert errors[-1].endswith(f"`input` must be a file that exists, got '{tmp_path / 'none'}'.")

"""Tests of `import metaphrase`: it registers the models, plugs in the fast code, and leaves the command line quick."""

import importlib.metadata
import subprocess
import sys

import metaphrase
from metaphrase.decoding import fast_generation, prepacked_weights
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.modeling.acceleration import acceleration
from metaphrase.ops import linear_and_dropout


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


def test_version_is_that_of_the_distribution():
    assert metaphrase.__version__ == importlib.metadata.version("metaphrase")


def test_fast_code_is_plugged_into_the_network():
    assert acceleration.linear is linear_and_dropout.linear
    assert acceleration.packed_kernels.keys() == {"grid", "flex"}
    assert acceleration.encoding.__module__ == prepacked_weights.__name__
    assert MetaphraseForConditionalGeneration._beam_search is fast_generation.FastGeneration._beam_search


def test_import_registers_the_models_with_transformers():
    code = "import metaphrase, transformers; print(type(transformers.AutoConfig.for_model('metaphrase')).__module__)"
    assert run(code).stdout.strip() == "metaphrase.modeling.configuration_metaphrase"


def test_a_second_call_of_install_changes_nothing():
    before = vars(acceleration) | {"packed_kernels": dict(acceleration.packed_kernels)}
    metaphrase.install()
    assert vars(acceleration) == before


def test_command_prints_its_help_without_torch():
    code = (
        "import sys; sys.argv = ['/usr/bin/metaphrase', '--help']\n"
        "from metaphrase.scripts.__main__ import main\n"
        "assert main() == 0 and 'torch' not in sys.modules"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "usage: metaphrase VERB" in done.stdout

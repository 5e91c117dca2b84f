"""`metaphrase VERB ...`: run a verb with the rest of the command line."""

# PYTHON_ARGCOMPLETE_OK

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

import metaphrase
from metaphrase.scripts.parsers import RECIPE_VERBS, make_parser, parse
from metaphrase.scripts.parsers.console import hide_weight_bars, nearest, paint, run
from metaphrase.scripts.parsers.options import recipe_fields

VERBS = {
    "demo": "train and show a small model on a generated corpus",
    "tokenize": "train a tokenizer",
    "filter": "drop pairs that are noise",
    "backtranslate": "make pairs from text in the target language",
    "distill": "make pairs from the targets of teachers",
    "train": "train a model by a recipe",
    "tune": "search for a better recipe",
    "evaluate": "score a model on a test set",
    "compare": "compare outputs of systems: scores, tests of significance, largest differences",
    "generate": "translate, summarize, ...: one target line for each source line",
    "convert": "convert weights of T5, BART, Marian and others, and back",
    "shortlist": "learn the target tokens of each source token, for faster decoding",
    "export": "export a model to CTranslate2 or ONNX",
    "attention": "show cross-attention: picture or word alignment",
    "explain": "show what each stage of a model computes for a pair: page or text",
    "average": "average the weights of several checkpoints",
    "serve": "serve models by HTTP",
    "push": "upload a model to the Hub",
}


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    notes = (
        "metaphrase VERB --help lists the options of a verb.",
        "metaphrase --version prints the version.",
    )
    return "usage: metaphrase VERB ...\n\n" + "\n".join(lines) + "\n\n" + "\n".join(notes)


def main() -> int:
    # A shell sets this variable when the user types a tab.
    if "_ARGCOMPLETE" in os.environ and importlib.util.find_spec("argcomplete"):
        complete()
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"metaphrase {metaphrase.__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        hint = nearest(verb, [*VERBS, "--help", "--version"])
        text = f"a verb must be one of {', '.join(VERBS)}, got {verb!r}.{hint}"
        print(f"metaphrase: {paint('error:', '31')} {text}", file=sys.stderr)
        return 2

    def run_verb(words: Sequence[str]) -> None:
        # Help, and an error in the command line, must not wait for the imports of the verb.
        parse(verb, words)
        module = importlib.import_module(f"metaphrase.scripts.{verb}")
        hide_weight_bars()
        module.main(words)

    return run(run_verb, verb, rest)


def complete() -> None:
    """Answer a shell that completes a command line, and exit. The package argcomplete does this by the parsers."""
    import argcomplete

    parser = argparse.ArgumentParser(prog="metaphrase", add_help=False)
    subparsers = parser.add_subparsers()
    for verb in VERBS:
        options = make_parser(verb)
        for name in recipe_fields() if verb in RECIPE_VERBS else ():
            if f"--{name}" not in options._option_string_actions:
                options.add_argument(f"--{name}")
        subparsers.add_parser(verb, parents=[options], add_help=False)
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    sys.exit(main())

"""`metaphrase VERB ...`: finds the verb and hands the rest of the command line to it."""

import difflib
import importlib
import sys

import metaphrase
from metaphrase.scripts.console import run

VERBS = {
    "demo": "train, score and draw a small model on a corpus that the project makes itself",
    "tokenize": "train a tokenizer",
    "train": "carry out a recipe",
    "evaluate": "score a model on a test set",
    "generate": "many lines in, many lines out",
    "convert": "weights of T5, BART, Marian and others in and out",
    "export": "a model for CTranslate2 or ONNX",
    "attention": "draw where the decoder looks",
    "average": "write the mean of several checkpoints as a model",
    "push": "share a model on the Hub",
}


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    notes = (
        "metaphrase VERB --help says more.",
        "With METAPHRASE_DEBUG=1 in the environment errors come with a traceback.",
    )
    return "usage: metaphrase VERB ...\n\n" + "\n".join(lines) + "\n\n" + "\n".join(notes)


def main() -> int:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        nearest = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        print(f"metaphrase: error: a verb must be one of {', '.join(VERBS)}, got {verb!r}.{hint}", file=sys.stderr)
        return 2
    metaphrase.install()
    return run(importlib.import_module(f"metaphrase.scripts.{verb}").main, verb, rest)


if __name__ == "__main__":
    sys.exit(main())

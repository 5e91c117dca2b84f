"""`metaphrase VERB ...`: run a verb with the rest of the command line."""

import difflib
import importlib
import sys

import metaphrase
from metaphrase.scripts.console import run

VERBS = {
    "demo": "train and show a small model on a generated corpus",
    "tokenize": "train a tokenizer",
    "train": "train a model by a recipe",
    "tune": "search for a better recipe",
    "evaluate": "score a model on a test set",
    "generate": "translate, summarize, ...: one target line for each source line",
    "convert": "convert weights of T5, BART, Marian and others, and back",
    "export": "export a model to CTranslate2 or ONNX",
    "attention": "show cross-attention: picture or word alignment",
    "explain": "show what each stage of a model computes for a pair: page or text",
    "average": "average the weights of several checkpoints",
    "push": "upload a model to the Hub",
}


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    notes = (
        "metaphrase VERB --help lists the options of a verb.",
        "Set METAPHRASE_DEBUG=1 in the environment for tracebacks.",
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

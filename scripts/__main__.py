"""`metaphrase VERB ...`: run a verb with the rest of the command line."""

# PYTHON_ARGCOMPLETE_OK

import argparse
import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence

import metaphrase
from metaphrase.scripts.parsers import RECIPE_VERBS, make_parser, parse, recipe_fields
from metaphrase.scripts.parsers.verbs import VERBS
from metaphrase.storage.hints import did_you_mean

# Their messages tell users of the command nothing.
_CHATTY = ("httpx", "huggingface_hub", "datasets", "matplotlib", "sacrebleu", "fsspec", "absl")


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
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
        hint = did_you_mean(verb, [*VERBS, "--help", "--version"])
        text = f"a verb must be one of {', '.join(VERBS)}, got {verb!r}.{hint}"
        print(f"metaphrase: {paint('error:', '31')} {text}", file=sys.stderr)
        return 2

    return run(verb, rest)


def paint(text: str, code: str) -> str:
    """Color a text for standard error, if that is a terminal and the user has not set NO_COLOR."""
    is_plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else f"\033[{code}m{text}\033[0m"


class LinesBetweenBars(logging.StreamHandler):
    """Handler whose lines do not end up behind a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        # Without the library there is no bar.
        library = sys.modules.get("tqdm")
        with library.tqdm.external_write_mode(self.stream) if library else contextlib.nullcontext():
            super().emit(record)


def run(verb: str, words: Sequence[str]) -> int:
    """Run a verb. Progress goes to standard error. An expected error is printed as one line without traceback.

    Args:
        verb: Name of the verb.
        words: Words of the command line after it.

    Returns:
        The exit status: 0, 2 after an error, or 130 after an interruption.
    """
    if "--quiet" in words or not sys.stderr.isatty():
        # For libraries that are not imported yet. Our own progress is lines of the log.
        os.environ.setdefault("TQDM_DISABLE", "1")
    is_verbose = "--verbose" in words or bool(os.environ.get("METAPHRASE_DEBUG"))
    level = logging.WARNING if "--quiet" in words else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", handlers=[LinesBetweenBars(sys.stderr)])
    # This library prints its messages itself.
    logging.getLogger("huggingface_hub").propagate = False
    for name in () if is_verbose else _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        # Help, and an error in the command line, do not wait for the imports of the verb.
        arguments = parse(verb, words)
        module = importlib.import_module(f"metaphrase.scripts.{verb}")
        hide_weight_bars()
        module.main(arguments)
    except BrokenPipeError:
        # The reader of standard output, such as `head`, has closed it.
        sys.stderr.close()
    except KeyboardInterrupt as interrupt:
        # A verb that can be resumed says how.
        print(" ".join([f"\nmetaphrase {verb}: interrupted.", *interrupt.args]), file=sys.stderr)
        if is_verbose:
            raise
        return 130
    except Exception as error:
        # A damaged file of weights, or a field of the wrong type in a configuration. EOFError: a truncated .gz file.
        names = {kind.__name__ for kind in type(error).__mro__} & {"SafetensorError", "StrictDataclassError"}
        if not names and not isinstance(error, ValueError | OSError | ImportError | EOFError):
            raise
        # Errors of the Hub and of configurations have many lines.
        text = error if isinstance(error, ValueError | ImportError) else " ".join(str(error).split())
        print(f"metaphrase {verb}: {paint('error:', '31')} {text}", file=sys.stderr)
        if is_verbose:
            raise
        return 2
    return 0


def hide_weight_bars() -> None:
    """Hide transformers' bars for loading and saving weights. Those for downloads stay, which take long."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    shows_downloads = not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    if shows_downloads:
        # transformers switches them off, too.
        enable_progress_bars()


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

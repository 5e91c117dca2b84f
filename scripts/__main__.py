"""`metaphrase VERB ...`: run a verb with the rest of the command line."""

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence

import metaphrase
from metaphrase.scripts.parsers import parse
from metaphrase.scripts.parsers.verbs import VERBS
from metaphrase.storage.hints import did_you_mean

# Their messages tell users of the command nothing.
_CHATTY = ("httpx", "huggingface_hub", "datasets", "matplotlib", "sacrebleu", "fsspec", "absl", "onnx_ir", "onnxscript")


def main() -> int:
    verb, *rest = sys.argv[1:] or [""]
    if verb in VERBS:
        return run(verb, rest)
    if verb in ("", "-h", "--help", "help"):
        print("usage: metaphrase VERB ...\n")
        for name, table in VERBS.items():
            print(f"  {name:<{max(map(len, VERBS))}}  {table.summary}")
        print("\nmetaphrase VERB --help lists the options of a verb.\nmetaphrase --version prints the version.")
        return 0 if verb else 2
    if verb in ("-V", "--version"):
        print(f"metaphrase {metaphrase.__version__}")
        return 0
    hint = did_you_mean(verb, [*VERBS, "--help", "--version"])
    print(f"metaphrase: error: a verb must be one of {', '.join(VERBS)}, got {verb!r}.{hint}", file=sys.stderr)
    return 2


def find_main(verb: str) -> Callable[[argparse.Namespace], None]:
    """Return the function that runs a verb, from the file of the verb or of a like one."""
    file, _, function = (VERBS[verb].main or f"{verb}.main").partition(".")
    return getattr(importlib.import_module(f"metaphrase.scripts.{file}"), function)


class LinesBetweenBars(logging.StreamHandler):
    """Handler whose lines do not end up behind a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        # Without the library there is no bar.
        library = sys.modules.get("tqdm")
        with library.tqdm.external_write_mode(self.stream) if library else contextlib.nullcontext():
            super().emit(record)


def run(verb: str, words: Sequence[str]) -> int:
    """Run a verb with the words after it. Progress goes to standard error. An expected error is one line without traceback.

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
    arguments = argparse.Namespace()
    try:
        # Help, and an error in the command line, do not wait for the imports of the verb.
        arguments = parse(verb, words)
        find_main(verb)(arguments)
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
        if isinstance(error, OSError) and error.filename is None and (output := getattr(arguments, "output", None)):
            # A full disk has no name.
            text += f" (output: {output})"
        print(f"metaphrase {verb}: error: {text}", file=sys.stderr)
        if is_verbose:
            raise
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

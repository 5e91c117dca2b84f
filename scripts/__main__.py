"""`metaphrase SUBCOMMAND ...`: run a subcommand with the rest of the command line."""

import argparse
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

import metaphrase
from metaphrase.errors import OF_FIRST_PROCESS, did_you_mean, is_mistake
from metaphrase.scripts.parsers import FILES, SUBCOMMANDS, parse

logger = logging.getLogger(__name__)

# Their messages tell users of the command nothing.
_CHATTY = ("httpx", "huggingface_hub", "datasets", "matplotlib", "sacrebleu", "fsspec", "absl", "onnx_ir", "onnxscript")


def main() -> int:
    name, *rest = sys.argv[1:] or [""]
    if name in SUBCOMMANDS:
        return run(name, rest)
    if name in ("", "-h", "--help", "help"):
        print("usage: metaphrase SUBCOMMAND ...\n")
        for subcommand, add_options in SUBCOMMANDS.items():
            print(f"  {subcommand:<{max(map(len, SUBCOMMANDS))}}  {add_options.__doc__}")
        print("\nmetaphrase SUBCOMMAND --help lists the options of a subcommand.")
        print("metaphrase --version prints the version.")
        return 0 if name else 2
    if name in ("-V", "--version"):
        print(f"metaphrase {metaphrase.__version__}")
        return 0
    hint = did_you_mean(name, [*SUBCOMMANDS, "--help", "--version"])
    text = f"a subcommand must be one of {', '.join(SUBCOMMANDS)}, got {name!r}.{hint}"
    print(f"metaphrase: error: {text}", file=sys.stderr)
    return 2


def find_main(subcommand: str) -> Callable[[argparse.Namespace], None]:
    """Return the function that runs a subcommand: `main` of its file, or the function of its name in that of another one."""
    module = importlib.import_module(f"metaphrase.scripts.{FILES.get(subcommand, subcommand)}")
    return getattr(module, subcommand if subcommand in FILES else "main")


def run(subcommand: str, words: Sequence[str]) -> int:
    """Run a subcommand with the words after it. Progress goes to standard error. A user's mistake is one line, a bug a traceback.

    Returns:
        The exit status: 0, 2 after an error, or 130 after an interruption.
    """
    if "--quiet" in words or not sys.stderr.isatty():
        # For libraries that are not imported yet. Our own progress is lines of the log.
        os.environ.setdefault("TQDM_DISABLE", "1")
    is_verbose = "--verbose" in words or bool(os.environ.get("METAPHRASE_DEBUG"))
    # Several processes would each tell the same.
    is_told = "--quiet" not in words and os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_told else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    # This library prints its messages itself.
    logging.getLogger("huggingface_hub").propagate = False
    for name in () if is_verbose else _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        # Help, and an error in the command line, do not wait for imports.
        arguments = parse(subcommand, words)
        from tqdm.contrib.logging import logging_redirect_tqdm

        # It takes seconds.
        logger.info("metaphrase %s: loading torch and transformers", subcommand)
        # A line of the log does not end up behind a progress bar.
        with logging_redirect_tqdm():
            find_main(subcommand)(arguments)
    except BrokenPipeError:
        # The reader of standard output, such as `head`, has closed it.
        sys.stderr.close()
    except KeyboardInterrupt as interrupt:
        # A subcommand that can be resumed says how.
        print(" ".join([f"\nmetaphrase {subcommand}: interrupted.", *interrupt.args]), file=sys.stderr)
        if is_verbose:
            raise
        return 130
    except Exception as error:
        if OF_FIRST_PROCESS in getattr(error, "__notes__", ()):
            # A launcher kills all when one ends, and the first one needs time to show the error.
            time.sleep(2)
            return 2
        if not is_mistake(error):
            raise
        # Errors of the Hub and of configurations have many lines.
        text = str(error) if isinstance(error, ValueError | ImportError) else " ".join(str(error).split())
        print(f"metaphrase {subcommand}: error: {text}", file=sys.stderr)
        if is_verbose:
            raise
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run a verb from a terminal: logging, errors, exit status."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

if TYPE_CHECKING:
    from metaphrase.inference import Generator, GeneratorPool

logger = logging.getLogger(__name__)


def verb_parser(verb: str, description: str, **options) -> argparse.ArgumentParser:
    """Return an empty parser for the words of a verb."""
    return argparse.ArgumentParser(prog=f"metaphrase {verb}", description=description, allow_abbrev=False, **options)


def run(main: Callable[[Sequence[str]], None], verb: str, words: Sequence[str] | None = None) -> int:
    """Run a verb. Progress goes to standard error. An expected error is printed as one line without traceback.

    With METAPHRASE_DEBUG set in the environment, the traceback is printed too.

    Args:
        main: The verb's function of the words after its name.
        verb: Name of the verb, for messages.
        words: Words of the command line; by default those of this process.

    Returns:
        The exit status: 0, 2 after an error, or 130 after an interruption.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for chatty in ("httpx", "huggingface_hub", "datasets", "matplotlib", "fsspec", "absl"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        main(sys.argv[1:] if words is None else words)
    except BrokenPipeError:
        # The reader of standard output, such as `head`, has closed it.
        sys.stderr.close()
    except KeyboardInterrupt:
        hint = " Use --resume to go on from the last checkpoint, if there is one." if verb in ("train", "tune") else ""
        print(f"\nmetaphrase {verb}: interrupted.{hint}", file=sys.stderr)
        if os.environ.get("METAPHRASE_DEBUG"):
            raise
        return 130
    except (ValueError, OSError, ImportError, EOFError, SafetensorError, StrictDataclassError) as error:
        # EOFError: a truncated .gz file. OSError: also a missing model and errors of the Hub, with messages of many lines.
        # StrictDataclassError: a config field of the wrong type, again with many lines.
        text = " ".join(str(error).split()) if isinstance(error, OSError | StrictDataclassError) else error
        print(f"metaphrase {verb}: error: {text}", file=sys.stderr)
        if os.environ.get("METAPHRASE_DEBUG"):
            raise
        return 2
    return 0


def check_dependents(arguments: argparse.Namespace, **needs: str) -> None:
    """Raise `ValueError` for an option without the one that it needs: `name="needed"`."""
    for name, needed in needs.items():
        value = getattr(arguments, name)
        if value is not None and getattr(arguments, needed) is None:
            raise ValueError(f"`{needed}` must be given with `{name}`, got None and {value!r}.")


def warn_of_lengths(generator: "Generator | GeneratorPool", num_sources: int) -> None:
    """Log the numbers of unfinished targets and of truncated sources, if any."""
    if generator.num_unfinished:
        text = "%d targets of %d sources are unfinished at the length limit. Raise max_length or max_new_tokens."
        logger.warning(text, generator.num_unfinished, num_sources)
    if generator.num_truncated:
        text = "%d of %d sources had more than max_source_length tokens and were truncated."
        logger.warning(text, generator.num_truncated, num_sources)

"""The console: what all verbs do alike when they are run from a terminal."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

if TYPE_CHECKING:
    from metaphrase.inference import Generator, GeneratorPool

logger = logging.getLogger(__name__)


def run(main: Callable[[Sequence[str]], None], verb: str, words: Sequence[str] | None = None) -> int:
    """Runs a verb: its progress to standard error, a mistake of the user as one line instead of a traceback.

    With METAPHRASE_DEBUG set in the environment, the traceback comes too.

    Args:
        main: The verb; takes the words after its name.
        verb: Its name, for messages.
        words: The words of the command line; those of this process by default.

    Returns:
        The exit status: 0, 2 for a mistake of the user, or 130 where the user interrupted it.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for chatty in ("httpx", "huggingface_hub", "datasets", "matplotlib", "fsspec", "absl"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        main(sys.argv[1:] if words is None else words)
    except BrokenPipeError:
        # The reader of our output, `head` for instance, has seen enough.
        sys.stderr.close()
    except KeyboardInterrupt:
        way_on = {"train": " --resume goes on from the last checkpoint, if there is one."}.get(verb, "")
        print(f"\nmetaphrase {verb}: interrupted.{way_on}", file=sys.stderr)
        if os.environ.get("METAPHRASE_DEBUG"):
            raise
        return 130
    except (ValueError, OSError, ImportError, EOFError, SafetensorError, StrictDataclassError) as error:
        # A compressed file that was cut short is an EOFError.
        # The Hub's errors and a model that is not found are among the OSErrors, whose text may have many lines.
        # So has that of a configuration with a text in place of a number, which is no ValueError.
        text = " ".join(str(error).split()) if isinstance(error, OSError | StrictDataclassError) else error
        print(f"metaphrase {verb}: error: {text}", file=sys.stderr)
        if os.environ.get("METAPHRASE_DEBUG"):
            raise
        return 2
    return 0


def check_dependents(arguments: argparse.Namespace, needs: Mapping[str, str]) -> None:
    """Checks that no option is given that means nothing without another one.

    Args:
        arguments: Of the command line; what is not given is `None`.
        needs: For each such option the one that it needs.

    Raises:
        ValueError: If an option is given without the one that it needs.
    """
    for name, needed in needs.items():
        value = getattr(arguments, name)
        if value is not None and getattr(arguments, needed) is None:
            raise ValueError(f"`{needed}` must be given with `{name}`, got None and {value!r}.")


def warn_of_lengths(generator: "Generator | GeneratorPool", num_sources: int) -> None:
    """Says how many targets have no end, and how many of the sources lost theirs, if any."""
    if generator.num_unfinished:
        logger.warning(
            "%d targets of %d sources met the length limit before their end: raise max_length or max_new_tokens.",
            generator.num_unfinished,
            num_sources,
        )
    if generator.num_truncated:
        logger.warning(
            "%d of %d sources had more tokens than max_source_length: their ends were cut off.",
            generator.num_truncated,
            num_sources,
        )

"""Parsers that answer in one line or one screen.

Help and errors must come at once, so that this file imports no other room and no heavy library at its top.
"""

import argparse
import difflib
import itertools
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metaphrase.inference import Generator, GeneratorPool

logger = logging.getLogger(__name__)

MAX_HELP_LINES = 40
_COMMON_GROUP = "options of all verbs"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" with the known word most like `word`; an empty text if none is similar.

    The room `tokenization` has such a function too, but importing the room takes seconds.
    """
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def paint(text: str, code: str) -> str:
    """Color a text for standard error, if that is a terminal and the user has not set NO_COLOR."""
    is_plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else f"\033[{code}m{text}\033[0m"


class _Help(argparse.Action):
    def __init__(self, option_strings, dest, help=None):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser, namespace, values, option_string=None):
        parser.print_help() if option_string != "--help_all" else print(parser.full_help(), end="")
        parser.exit()


class VerbParser(argparse.ArgumentParser):
    """Parser whose errors are one line, and whose `--help` fits a screen.

    Groups of options that do not fit are named by `--help` and explained by `--help_all`.
    """

    def error(self, message: str):
        if message.startswith("the following arguments are required: ") and "--" not in message:
            message += f". Write them first: {self.prog} {message.rpartition(': ')[2].replace(',', '')} [option ...]"
        self.exit(2, f"{self.prog}: {paint('error:', '31')} {message}\n")

    def with_underscores(self, words: Sequence[str]) -> list[str]:
        """Return the words with `-` in the names of known options written as `_`."""
        names = {name[:2] + name[2:].replace("_", "-"): name for name in self._option_string_actions}
        parts = [word.partition("=") for word in words]
        return ["".join((names.get(name, name), *rest)) for name, *rest in parts]

    def parse_args(self, args: Sequence[str], namespace=None):
        args = self.with_underscores(args)
        # argparse would first complain of a required option, whose name may be mistyped.
        for word in itertools.takewhile(lambda word: word != "--", args):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in self._option_string_actions:
                hint = nearest(name, self._option_string_actions) or f" See `{self.prog} --help`."
                self.error(f"unknown option {name}.{hint}")
        arguments, extra = self.parse_known_args(args, namespace)
        if extra:
            self.error(f"unknown argument {extra[0]!r}. See `{self.prog} --help`.")
        return arguments

    def full_help(self) -> str:
        """Return the help texts of all options."""
        return self._explain(self._ordered_groups())

    def format_help(self) -> str:
        text, groups = self.full_help(), self._ordered_groups()
        if text.count("\n") <= MAX_HELP_LINES:
            return text
        lines = [f"\nmore options, explained by `{self.prog} --help_all`:"]
        for group in groups[2:]:
            names = " ".join(action.option_strings[0] for action in group._group_actions)
            width = shutil.get_terminal_size().columns - 2
            lines.append(textwrap.fill(f"{group.title}: {names}", width, initial_indent="  ", subsequent_indent="    "))
        return self._explain(groups[:2]) + "\n".join(lines) + "\n"

    def _ordered_groups(self) -> list[argparse._ArgumentGroup]:
        """Return the groups, positional arguments and the verb's own options first, options of all verbs last."""
        return sorted(self._action_groups, key=lambda group: group.title == _COMMON_GROUP)

    def _explain(self, groups: Sequence[argparse._ArgumentGroup]) -> str:
        formatter = self._get_formatter()
        required = [action for action in self._actions if action.required]
        # An option with several values would take a positional argument behind it.
        required.sort(key=lambda action: bool(action.option_strings))
        words = [[*action.option_strings[:1], formatter._format_args(action, action.dest)] for action in required]
        first = next((number for number, action in enumerate(required) if action.option_strings), len(required))
        words.insert(first, ["[option ...]"])
        formatter.add_usage(self.usage or " ".join(["%(prog)s", *itertools.chain(*words)]), [], [])
        formatter.add_text(self.description)
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help()


def verb_parser(verb: str, description: str, **options) -> VerbParser:
    """Return a parser with the options that all verbs have."""
    parser = VerbParser(
        prog=f"metaphrase {verb}", description=description, allow_abbrev=False, add_help=False, **options
    )
    group = parser.add_argument_group(_COMMON_GROUP)
    group.add_argument("-h", "--help", action=_Help, help="show the most used options and exit")
    group.add_argument("--help_all", action=_Help, help="show all options and exit")
    group.add_argument("--quiet", action="store_true", help="print only warnings, errors and results")
    text = "print messages of libraries, and tracebacks of errors; METAPHRASE_DEBUG=1 does the same"
    group.add_argument("--verbose", action="store_true", help=text)
    return parser


def check_dependents(arguments: argparse.Namespace, **needs: str) -> None:
    """Raise `ValueError` for an option without the one that it needs: `name="needed"`."""
    for name, needed in needs.items():
        value = getattr(arguments, name)
        if value is not None and getattr(arguments, needed) is None:
            raise ValueError(f"`{needed}` must be given with `{name}`, got None and {value!r}.")


def warn_of_lengths(generator: "Generator | GeneratorPool", num_sources: int) -> None:
    """Log the numbers of unfinished targets and of truncated sources, if any."""
    if generator.num_unfinished:
        text = "Targets that are unfinished at the length limit: %d (sources: %d). Raise max_length or max_new_tokens."
        logger.warning(text, generator.num_unfinished, num_sources)
    if generator.num_truncated:
        text = "%d of %d sources had more than max_source_length tokens and were truncated."
        logger.warning(text, generator.num_truncated, num_sources)
    if generator.num_cut:
        logger.warning("%d sentences were too long and were cut between clauses.", generator.num_cut)

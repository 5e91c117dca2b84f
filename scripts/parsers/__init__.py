"""Parsers of the command line. This folder imports no heavy library, so that help and errors come at once."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from metaphrase.errors import MetaphraseError, did_you_mean
from metaphrase.plugins import plugin
from metaphrase.scripts.parsers import options
from metaphrase.storage.generation_options import GENERATION_OPTIONS, complete_sampling

# Subcommands that take fields of a recipe as options.
RECIPE_SUBCOMMANDS = ("train", "tune", "demo")
# Subcommands that write a line or more for each line that they read.
STREAM_SUBCOMMANDS = ("generate", "backtranslate", "distill")
MAX_HELP_LINES = 40
COMMON_GROUP = "options of all subcommands"

# Files of subcommands that share a file with another one.
FILES = dict.fromkeys(("adapt", "average", "export"), "convert") | dict.fromkeys(("embed", "rerank"), "classify")
FILES |= {"shortlist": "filter", "attention": "explain", "distill": "backtranslate"}

_FUNCTIONS = (options.train, options.evaluate, options.generate, options.push, *(plugin("subcommands") or tuple)())
SUBCOMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    function.__name__: function
    for function in _FUNCTIONS
    if Path(__file__).parents[1].joinpath(f"{FILES.get(function.__name__, function.__name__)}.py").is_file()
}


class Parser(argparse.ArgumentParser):
    """Parser whose errors are `MetaphraseError`, and whose `--help` fits a screen.

    Groups of options that do not fit are named by `--help` and explained by `--help_all`.
    """

    def error(self, message: str):
        match = re.fullmatch(r"argument ([\w/-]+): (.*)", message, re.DOTALL)
        if match is None:
            raise MetaphraseError(message)
        name, text = match[1].split("/")[-1].lstrip("-"), match[2]
        raise MetaphraseError(f"`{name}` {text}." if text.startswith("must ") else f"`{name}`: {text}.")

    def format_help(self, is_full: bool = False) -> str:
        text, groups = super().format_help(), self._action_groups
        if is_full or text.count("\n") <= MAX_HELP_LINES:
            return text
        lines = [f"\nmore options, explained by `{self.prog} --help_all`:"]
        for group in groups[2:]:
            names = " ".join(action.option_strings[0] for action in group._group_actions)
            width = shutil.get_terminal_size().columns - 2
            lines.append(textwrap.fill(f"{group.title}: {names}", width, initial_indent="  ", subsequent_indent="    "))
        self._action_groups = groups[:2]
        text, self._action_groups = super().format_help(), groups
        return text + "\n".join(lines) + "\n"


def make_parser(subcommand: str) -> Parser:
    """Return the parser of a subcommand. Types name the metavars, and defaults are added to the help."""
    add_options = SUBCOMMANDS[subcommand]
    prog, description = f"metaphrase {subcommand}", add_options.__doc__
    parser = Parser(prog=prog, description=description, allow_abbrev=False, add_help=False)
    add_options(parser)
    add = parser.add_argument_group(COMMON_GROUP).add_argument
    add("-h", "--help", action="store_true", help="show the most used options and exit")
    add("--help_all", action="store_true", help="show all options and exit")
    add("--quiet", action="store_true", help="print only warnings, errors and results")
    text = "print messages of libraries, and tracebacks of errors; METAPHRASE_DEBUG=1 does the same"
    add("--verbose", action="store_true", help=text)
    required = []
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and action.metavar is None:
            kind = getattr(action.type, "__name__", "text").upper()
            action.metavar = "|".join(action.choices) if action.choices else kind
        if action.default not in (None, False, "", []) and action.help and "[" not in action.help:
            action.help += " [%(default)s]"
        if action.required:
            required.append(" ".join([*action.option_strings[:1], str(action.metavar or action.dest)]))
    # An option with several values would take a positional argument behind it.
    required.sort(key=lambda words: words.startswith("-"))
    parser.usage = parser.usage or " ".join(["%(prog)s", *required, "[option ...]"])
    return parser


def parse(subcommand: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after a subcommand. Words that set fields of a recipe are in `fields` of the result.

    Raises:
        SystemExit: After the help.
        MetaphraseError: If an option is unknown or has a wrong value, or an output would be lost.
    """
    parser = make_parser(subcommand)
    names = {name.replace("_", "-"): name for name in parser._option_string_actions}
    parts = (word.partition("=") for word in words)
    words = ["".join((names.get(name.replace("_", "-"), name), *value)) for name, *value in parts]
    if "--help_all" in words or {"-h", "--help"} & {*words}:
        print(parser.format_help(is_full="--help_all" in words), end="")
        parser.exit()
    own_words: list[str] = []
    fields: list[str] = []
    target = own_words
    for word in words:
        name = word.partition("=")[0]
        # Options end at `--`. A text with spaces is a value.
        if word.startswith("--") and " " not in name and "--" not in (*own_words, word):
            target = own_words if name in names.values() else fields
            if target is fields and subcommand not in RECIPE_SUBCOMMANDS:
                hint = did_you_mean(name, names.values()) or f" See `{parser.prog} --help`."
                raise MetaphraseError(f"unknown option {name}.{hint}")
        target.append(word)
    arguments = parser.parse_args(own_words)
    arguments.fields = fields
    if subcommand in STREAM_SUBCOMMANDS and not arguments.overwrite and not arguments.resume:
        path = arguments.output
        # The input as output has an error of its own.
        if path not in (None, arguments.input) and Path(path).is_file() and Path(path).stat().st_size:
            raise MetaphraseError(f"`output` must be a new file, got {path!r}. Pass --overwrite, or --resume to go on.")
    return arguments


def chosen_loading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return arguments of `Generator.from_pretrained`. Beams stop early, as in fairseq and Marian, if the user asks for beams."""
    loading = given_options(arguments, (*options.LANGUAGES, *options.LOADING, *options.ENGINE))
    return loading | ({"early_stopping": True} if (getattr(arguments, "num_beams", None) or 1) > 1 else {})


def chosen_generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the generation options given on the command line."""
    return complete_sampling(given_options(arguments, GENERATION_OPTIONS))


def given_options(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the options that have a value."""
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}


def check_dependents(arguments: argparse.Namespace, **needs: str) -> None:
    """Raise `MetaphraseError` for an option without the one that it needs: `name="needed"`."""
    for name, needed in needs.items():
        value = getattr(arguments, name)
        if value not in (None, False) and getattr(arguments, needed) is None:
            raise MetaphraseError(f"`{needed}` must be given with `{name}`, got None and {value!r}.")

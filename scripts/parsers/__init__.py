"""Parsers of the command line, made from the tables of `verbs.py`. This folder imports no heavy library, so that help and
errors come at once."""

import argparse
import ast
import functools
import importlib.util
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from metaphrase.scripts.parsers.verbs import (
    FILTER_RULES,
    LOADING_OPTIONS,
    PAIR_SUFFIXES,
    TYPES,
    VERBS,
    bool_or_never,
    parse_bool,
)
from metaphrase.storage.generation_options import GENERATION_OPTIONS, complete_sampling
from metaphrase.storage.hints import did_you_mean

# Verbs that take fields of a recipe as options.
RECIPE_VERBS = ("train", "tune", "demo")
# Verbs that write a line or more for each line that they read.
STREAM_VERBS = ("generate", "backtranslate", "distill")
MAX_HELP_LINES = 40
_COMMON_GROUP = "options of all verbs"
_COMMON = {
    "-h, --help": "show the most used options and exit",
    "--help_all": "show all options and exit",
    "--quiet": "print only warnings, errors and results",
    "--verbose": "print messages of libraries, and tracebacks of errors; METAPHRASE_DEBUG=1 does the same",
}
_KEY = re.compile(
    r"(?P<names>[\w-]+(?:, [\w-]+)*)(?: (?P<metavar>[^-\s]\S*?))?(?P<nargs>\.\.\.|\?|\*)?(?P<required>!)?(?: = (?P<default>.*))?"
)


class VerbParser(argparse.ArgumentParser):
    """Parser whose errors are `ValueError`, and whose `--help` fits a screen.

    Groups of options that do not fit are named by `--help` and explained by `--help_all`.
    """

    def error(self, message: str):
        match = re.fullmatch(r"argument ([\w/-]+): (.*)", message, re.DOTALL)
        if match is None:
            raise ValueError(message)
        name, text = match[1].split("/")[-1].lstrip("-"), match[2]
        raise ValueError(f"`{name}` {text}." if text.startswith("must ") else f"`{name}`: {text}.")

    def format_help(self, is_full: bool = False) -> str:
        # The verb's own options come first, those of all verbs last.
        groups = sorted(self._action_groups, key=lambda group: group.title == _COMMON_GROUP)
        text = self._explain(groups)
        if is_full or text.count("\n") <= MAX_HELP_LINES:
            return text
        lines = [f"\nmore options, explained by `{self.prog} --help_all`:"]
        for group in groups[2:]:
            names = " ".join(action.option_strings[0] for action in group._group_actions)
            width = shutil.get_terminal_size().columns - 2
            lines.append(textwrap.fill(f"{group.title}: {names}", width, initial_indent="  ", subsequent_indent="    "))
        return self._explain(groups[:2]) + "\n".join(lines) + "\n"

    def _explain(self, groups: Sequence[argparse._ArgumentGroup]) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help()


def make_parser(verb: str) -> VerbParser:
    """Return the parser of a verb, from its table."""
    table = VERBS[verb]
    description = f"{table.summary[0].upper()}{table.summary[1:]}."
    parser = VerbParser(prog=f"metaphrase {verb}", description=description, allow_abbrev=False, add_help=False)
    for title, options in {"": table.options, **table.groups, _COMMON_GROUP: _COMMON}.items():
        group = parser.add_argument_group(title) if title else parser
        for key, value in options.items():
            names, settings = _argument(key, *([value, {}] if isinstance(value, str) else value))
            group.add_argument(*names, **settings)
    words = [
        [*action.option_strings[:1], action.metavar or action.dest] for action in parser._actions if action.required
    ]
    # An option with several values would take a positional argument behind it.
    words.sort(key=len)
    first = next((number for number, word in enumerate(words) if len(word) == 2), len(words))
    words.insert(first, ["[option ...]"])
    parser.usage = table.usage or " ".join(["%(prog)s", *(" ".join(word) for word in words)])
    return parser


def _argument(key: str, text: str, more: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an option and the other arguments of `add_argument`, from an entry of a table."""
    names, metavar, nargs, required, default = _KEY.fullmatch(key).groups()
    is_option, kind = names.startswith("-"), TYPES.get(metavar)
    if is_option and metavar is None:
        return names.split(", "), {"action": "store_true", "help": text}
    settings: dict[str, Any] = {"help": text}
    if is_option:
        settings["metavar"] = metavar
    if is_option and required:
        settings["required"] = True
    if kind is not None:
        settings["type"] = kind
    elif metavar == "RULE":
        settings["choices"] = FILTER_RULES
    elif metavar and "|" in metavar:
        settings["choices"] = metavar.split("|")
    if kind in (parse_bool, bool_or_never):
        settings |= {"nargs": "?", "const": True}
    elif nargs:
        settings["nargs"] = "+" if nargs == "..." else nargs
    if default is not None:
        word = default.strip('"')
        settings["default"] = word.split() if nargs == "..." else kind(word) if kind else word
        if word and "[" not in text:
            settings["help"] = f"{text} [{word}]"
    return names.split(", "), settings | more


def parse(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after a verb. Words that set fields of a recipe are in `fields` of the result.

    Raises:
        SystemExit: After the help.
        ValueError: If an option is unknown or has a wrong value, a word names no field of a recipe, or an output would be lost.
        OSError: If a file of pairs does not exist.
    """
    parser = make_parser(verb)
    names = {name[:2] + name[2:].replace("_", "-"): name for name in parser._option_string_actions}
    words = ["".join((names.get(name, name), *rest)) for name, *rest in (word.partition("=") for word in words)]
    if "--help_all" in words or {"-h", "--help"} & {*words}:
        print(parser.format_help(is_full="--help_all" in words), end="")
        parser.exit()
    own_words, fields, is_own = [], [], True
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and " " not in name and word != "--":
            is_own = name in names.values()
            if not is_own and verb in RECIPE_VERBS:
                field = name.removeprefix("--").partition(".")[0].replace("-", "_")
                if not {field, field.removeprefix("no_")} & set(recipe_fields()):
                    known = [*recipe_fields(), *(option.removeprefix("--") for option in names.values())]
                    hint = did_you_mean(field, known) or " Fields of the network go below `model`."
                    raise ValueError(
                        f"Every field must be one that a recipe has, got `{field}` in the command line.{hint}"
                    )
            elif not is_own and "--" not in own_words:
                hint = did_you_mean(name, names.values()) or f" See `{parser.prog} --help`."
                raise ValueError(f"unknown option {name}.{hint}")
        (own_words if is_own else fields).append(word)
    arguments = parser.parse_args(own_words)
    arguments.fields = fields
    if verb in STREAM_VERBS and not arguments.overwrite and not arguments.resume:
        path = arguments.output
        # The input as output has an error of its own.
        if path not in (None, arguments.input) and Path(path).is_file() and Path(path).stat().st_size:
            raise ValueError(
                f"`output` must be a new file, got {path!r}, which is not empty. Pass --overwrite to replace the file, or "
                "--resume to go on with a stopped run."
            )
    if verb in ("train", "tune") and not any(word.startswith(("--data_dir", "--data-dir")) for word in fields):
        pairs = arguments.recipe
        is_file = len(pairs) == 2 or (pairs and Path(pairs[0].removesuffix(".gz")).suffix in PAIR_SUFFIXES)
        missing = [word for word in pairs if is_file and not Path(word).expanduser().exists()]
        if missing:
            raise FileNotFoundError(
                f"A file of pairs must exist, got {missing[0]!r}. Pass --data_dir FOLDER if it is not in this folder."
            )
    return arguments


@functools.cache
def recipe_fields() -> tuple[str, ...]:
    """Return the names of all fields of a recipe.

    The names are read from the sources of the classes: importing the classes takes seconds.
    """
    library, rooms = Path(importlib.util.find_spec("transformers").origin).parent, Path(__file__).parents[2]
    files = {
        rooms / "training" / "recipe" / "fields.py": "OwnFields",
        library / "training_args.py": "TrainingArguments",
        library / "training_args_seq2seq.py": "Seq2SeqTrainingArguments",
    }
    names = []
    for path, class_name in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
        names += [node.target.id for node in body if isinstance(node, ast.AnnAssign)]
    return tuple(dict.fromkeys(names))


# Options that several verbs read


def chosen_models(arguments: argparse.Namespace) -> list[str]:
    """Return the names of all models, the first one in front."""
    return [arguments.model, *(arguments.ensemble or [])]


def chosen_loading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return arguments of `Generator.from_pretrained`."""
    return given_options(arguments, LOADING_OPTIONS)


def chosen_generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the generation options given on the command line."""
    return complete_sampling(given_options(arguments, GENERATION_OPTIONS))


def given_options(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the options that have a value."""
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}


def check_dependents(arguments: argparse.Namespace, **needs: str) -> None:
    """Raise `ValueError` for an option without the one that it needs: `name="needed"`."""
    for name, needed in needs.items():
        value = getattr(arguments, name)
        if value not in (None, False) and getattr(arguments, needed) is None:
            raise ValueError(f"`{needed}` must be given with `{name}`, got None and {value!r}.")

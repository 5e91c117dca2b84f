"""Tables of the reference pages, made from the code: recipe fields, commands, public names."""

import argparse
import html
import importlib
import inspect
import re
import tomllib
from pathlib import Path

from metaphrase.modeling import MetaphraseConfig
from metaphrase.scripts.parsers import COMMON_GROUP, SUBCOMMANDS, make_parser
from metaphrase.training.recipe.fields import OWN_FIELDS, TRAINING_DEFAULTS, type_name

ROOT = Path(__file__).parents[1]
GROUPS = {
    "data": "Data",
    "tasks": "Several tasks",
    "stages": "Stages",
    "tokenizer": "Tokenizer",
    "model": "Model",
    "batches": "Batches and time",
    "technique": "Techniques",
    "evaluation": "Evaluation and decoding",
    "search": "Search",
}
API = {
    "metaphrase.modeling": "The network",
    "metaphrase.inference": "Generate, score and align",
    "metaphrase.scripts.train": "Run a recipe",
    "metaphrase.training.experiment": "Train",
    "metaphrase.training.trainer": "The trainer",
    "metaphrase.training.recipe.recipe": "Recipes",
    "metaphrase.choices.completion": "Choose settings",
    "metaphrase.evaluation.evaluate": "Evaluate",
    "metaphrase.tokenization": "Tokenizers",
    "metaphrase.conversion": "Conversion",
    "metaphrase.hub_card": "Model card and pictures",
}
# Modules without `__all__`: only these names are public.
PUBLIC = {
    "metaphrase.scripts.train": ["train"],
    "metaphrase.training.experiment": ["Experiment"],
    "metaphrase.training.trainer": ["MetaphraseTrainer"],
    "metaphrase.training.recipe.recipe": ["Recipe", "load_recipe"],
    "metaphrase.choices.completion": ["complete"],
    "metaphrase.evaluation.evaluate": ["evaluate_generator"],
}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def recipe_fields() -> str:
    """Return a heading and a table for each group of fields. Two columns fit a narrow screen."""
    text = []
    for group, title in GROUPS.items():
        rows = []
        for name, field in OWN_FIELDS.items():
            if field.json_schema_extra["group"] == group:
                default = f", default {field.default}" if isinstance(field.default, str | int | float) else ""
                meaning = html.escape(field.description, False)
                rows.append([f"`{name}`", f"{meaning} *({type_name(field.annotation)}{default})*"])
        text.append(f"## {title}\n\n{table(['field', 'meaning'], rows)}")
    return "\n\n".join(text)


def training_defaults() -> str:
    return table(["field", "default"], [[f"`{name}`", f"`{value}`"] for name, value in TRAINING_DEFAULTS.items()])


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    value = "" if action.nargs == 0 else f" {action.metavar}"
    names = ", ".join(action.option_strings)
    # Argparse fills in the defaults of a help text by this method only.
    text = parser._get_formatter()._expand_help(action)
    return [f"`{names}{value}`" if names else f"`{action.metavar or action.dest}`", html.escape(text, False)]


def commands() -> str:
    """Return a heading, a description and tables of options for each subcommand."""
    text = []
    for subcommand in SUBCOMMANDS:
        parser = make_parser(subcommand)
        text.append(f"## metaphrase {subcommand}\n\n{html.escape(parser.description, False)}")
        for group in parser._action_groups:
            # The text of the page describes the options of all subcommands.
            if group._group_actions and group.title != COMMON_GROUP:
                rows = [_option(parser, action) for action in group._group_actions]
                text.append(table([group.title, "meaning"], rows))
    return "\n\n".join(text)


def presets() -> str:
    """Return the dimensions of each preset."""
    rows = []
    for name in MetaphraseConfig.presets():
        config = MetaphraseConfig.from_preset(name)
        layers = f"{config.encoder_layers} + {config.decoder_layers}"
        rows.append([f"`{name}`", layers, str(config.hidden_size), str(config.encoder_attention_heads)])
        rows[-1] += [
            str(config.encoder_ffn_dim),
            config.position_embedding_type,
            config.norm_type,
            config.norm_position,
        ]
    head = ["preset", "layers", "width", "heads", "feed-forward", "positions", "norm", "place of the norm"]
    return table(head, rows)


def public_names() -> str:
    """Return directives of autodoc for all public names."""
    text = []
    for module, title in API.items():
        room = importlib.import_module(module)
        lines = []
        for name in PUBLIC.get(module) or room.__all__:
            value = getattr(room, name)
            if inspect.isclass(value):
                lines += [f".. autoclass:: {module}.{name}", "   :members:", ""]
            elif callable(value):
                lines += [f".. autofunction:: {module}.{name}", ""]
        fence = "```"
        text.append(f"## {title}\n\n`{module}`\n\n{fence}{{eval-rst}}\n" + "\n".join(lines) + f"{fence}")
    return "\n\n".join(text)


def versions() -> str:
    """Return the versions that each dependency and extra may have, and those that are tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.lower().split("==") for line in lines if "==" in line and not line.startswith("#"))
    rows = []
    for extra, packages in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for package in packages:
            name, permitted = re.match(r"([\w.-]+)(.*)", package).groups()
            if permitted and extra not in ("dev", "docs"):
                rows.append([name, extra and f"`{extra}`", permitted, tested.get(name.lower(), "")])
    return table(["package", "extra", "permitted", "tested"], rows)


def benchmarks() -> str:
    """Return the two pages of `benchmarks/`, with links as they are from this folder."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    commands = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    # Headings of the second page go one level lower. Comments in its commands begin with small letters.
    lower = re.sub(r"^(#+ [A-Z])", r"#\1", commands, flags=re.MULTILINE)
    text = text.replace("(results/README.md)", "(#results)") + "\n" + lower
    return re.sub(r"\((\.\./)+docs/", "(", text)


TEXTS = {
    "versions": versions,
    "benchmarks": benchmarks,
    "recipe_fields": recipe_fields,
    "training_defaults": training_defaults,
    "commands": commands,
    "presets": presets,
    "public_names": public_names,
}

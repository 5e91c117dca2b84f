"""Values of a recipe: reading YAML strictly, and fitting each value, from a file or the command line, to a field's type.

YAML is read with the scalars of its version 1.2: `no` and `on` are words, not truth values, `1e-3` is a number, and neither
`1:30` nor a date is anything but text.
"""

import enum
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

TRUTH_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)", "-+.0123456789"),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"a key must be a name, got {key!r}", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Also quotes text that other readers of YAML, or ours, would take for something else."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {
        first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _name, (_pattern, _first) in SCALARS.items():
    _letters = ["" if letter == "\0" else letter for letter in _first]
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _letters)


def load_yaml(text: str, where: str) -> Any:
    """Parses one YAML document.

    Raises:
        ValueError: If it is not YAML, or a mapping has a key twice or one that is not a name.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} must be valid YAML: {error}") from error


def dump_yaml(mapping: dict[str, Any]) -> str:
    """Returns YAML that `load_yaml` reads back as an equal mapping, in the same order."""
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True)
class ValueType:
    """What a field accepts, as read from its annotation.

    Attributes:
        kinds: Out of bool, int, float, str, list and dict.
        choices: The texts allowed where not every text is.
        is_optional: Whether `null` is accepted.
    """

    kinds: frozenset[type]
    choices: tuple[str, ...]
    is_optional: bool

    @classmethod
    def of(cls, annotation: Any) -> "ValueType":
        """Reads an annotation; classes that a recipe cannot write down are left out."""
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        members = typing.get_args(annotation) if is_union else (annotation,)
        kinds: set[type] = set()
        choices: list[str] = []
        for member in members:
            origin = typing.get_origin(member) or member
            if origin is Literal:
                choices += [choice for choice in typing.get_args(member) if isinstance(choice, str)]
                kinds |= {type(choice) for choice in typing.get_args(member) if not isinstance(choice, str)}
            elif isinstance(origin, type) and issubclass(origin, enum.Enum):
                choices += [choice.value for choice in origin]
            elif origin is Path:
                kinds.add(str)
            elif origin in (bool, int, float, str, list, dict):
                kinds.add(origin)
        if choices:
            # `SomeEnum | str` means: the enum, or the text of one of its members.
            kinds.discard(str)
        return cls(frozenset(kinds), tuple(choices), type(None) in members)

    def __str__(self) -> str:
        names = {bool: "true or false", int: "int", float: "float", str: "text", list: "list of texts", dict: "mapping"}
        parts = [words for kind, words in names.items() if kind in self.kinds]
        if self.choices:
            parts.append(f"one of {', '.join(self.choices)}")
        return " or ".join(parts + ["null"] * self.is_optional) or "nothing that a recipe can hold"


class _Misfit(Exception):
    """The value does not fit the type."""


def fit_value(field: str, value: Any, value_type: ValueType, where: str) -> Any:
    """Returns a value read from YAML as the field's type has it.

    Raises:
        ValueError: If it does not fit.
    """
    try:
        return _fit(value, value_type)
    except _Misfit:
        raise _wrong_type(field, value, value_type, where) from None


def fit_words(field: str, words: list[str], value_type: ValueType, where: str) -> Any:
    """Returns the words that followed an option on the command line as the field's type has it.

    None at all is true, several are a list, and a list in one word is separated by commas or spaces, or is YAML.

    Raises:
        ValueError: If they do not fit.
    """
    try:
        if not words:
            return _fit(True, value_type)
        if len(words) > 1:
            return _fit([part for word in words for part in _split(word)], value_type)
        return _fit_word(words[0], value_type)
    except _Misfit:
        given = words[0] if len(words) == 1 else words
        raise _wrong_type(field, given, value_type, where) from None


def _wrong_type(field: str, value: Any, value_type: ValueType, where: str) -> ValueError:
    return ValueError(f"`{field}` must be {value_type}, got {value!r} ({type(value).__name__}) in {where}.")


def _fit_word(word: str, value_type: ValueType) -> Any:
    if word in value_type.choices or value_type.kinds == {str}:
        return None if word == "null" and value_type.is_optional else word
    try:
        parsed = load_yaml(word, "")
        if not isinstance(parsed, str):
            return _fit(parsed, value_type)
    except (ValueError, _Misfit):
        pass
    return _fit(word, value_type)


def parse_words(words: list[str]) -> Any:
    """Returns the words after a dotted option, whose type is not known here, as YAML has them."""
    if not words:
        return True
    parsed = [load_yaml(word, f"{word!r}") for word in words]
    return parsed[0] if len(parsed) == 1 else parsed


def _split(text: str) -> list[str]:
    return [part for part in re.split(r"[,\s]+", text) if part]


def _fit(value: Any, value_type: ValueType) -> Any:
    kinds = value_type.kinds
    match value:
        case None if value_type.is_optional:
            return None
        case bool() if bool in kinds:
            return value
        case bool():
            raise _Misfit
        case int() if int in kinds or float in kinds:
            return value
        case float() if float in kinds:
            return value
        case float() if int in kinds and value.is_integer():
            return int(value)
        case str():
            return _fit_text(value, value_type)
        case list() if list in kinds and all(isinstance(item, str) for item in value):
            return value
        case dict() if dict in kinds:
            return value
    raise _Misfit


def _fit_text(text: str, value_type: ValueType) -> Any:
    kinds = value_type.kinds
    if text in value_type.choices or str in kinds:
        return text
    if bool in kinds and text.lower() in TRUTH_WORDS:
        return TRUTH_WORDS[text.lower()]
    if list in kinds:
        return _split(text)
    raise _Misfit

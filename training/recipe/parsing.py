"""Values of a recipe: strict YAML, and conversion of each value to the type of its field.

Scalars are those of YAML 1.2: `no` and `on` are texts, `1e-3` is a number, and `1:30` and dates are texts.
"""

import enum
import re
import types
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

_BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Pattern of each kind of scalar, and the letters it may begin with ("" for an empty scalar).
_SCALARS = {
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?[0-9]+", [*"-+0123456789"]),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)", [*"-+.0123456789"]),
}
# A short file with aliases of aliases may stand for a billion values.
_MAX_VALUES = 100_000
_TYPE_NAMES = {bool: "true or false", int: "int", float: "float", str: "text", list: "list of texts", dict: "mapping"}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = None if isinstance(key, str) else f"a key must be a name, got {key!r}"
            if key in keys:
                problem = f"the key `{key}` occurs twice"
            if problem is not None:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that also quotes texts which other YAML readers, or ours, would take for another type."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {
        first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))
for _name, (_pattern, _letters) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _letters)


def load_yaml(text: str, where: str) -> Any:
    """Parse one YAML document.

    Raises:
        ValueError: If it is not YAML, a mapping has a key twice or a key that is not a text, or there are too many values.
    """
    try:
        content = yaml.load(text, Loader=_Loader)
        num_values = _count_values(content, {})
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark and where else ""
        raise ValueError(f"{where} must be valid YAML, got an error{line}: {error.problem}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{where} must be valid YAML: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        # PyYAML does not catch the errors of `!!bool abc` and the like.
        raise ValueError(f"{where} must be valid YAML, got a value that its tag does not fit: {error}") from error
    if num_values > _MAX_VALUES:
        raise ValueError(f"{where} must hold at most {_MAX_VALUES:,} values with each alias written out, got more.")
    return content


def _count_values(content: Any, counts: dict[int, float]) -> float:
    """Return the number of values with each alias written out: infinite for a list that holds itself."""
    if not isinstance(content, list | dict):
        return 1
    if id(content) not in counts:
        counts[id(content)] = float("inf")
        items = content.values() if isinstance(content, dict) else content
        counts[id(content)] = 1 + sum(_count_values(item, counts) for item in items)
    return counts[id(content)]


def dump_yaml(mapping: dict[str, Any]) -> str:
    """Return YAML from which `load_yaml` reads an equal mapping, in the same order."""
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True)
class ValueType:
    """Values that a field accepts, read from its annotation.

    Attributes:
        kinds: Types among bool, int, float, str, list and dict.
        choices: All accepted texts, if not every text is.
        is_optional: True if `null` is accepted.
    """

    kinds: frozenset[type]
    choices: tuple[str, ...]
    is_optional: bool

    @classmethod
    @cache
    def of(cls, annotation: Any) -> "ValueType":
        """Read an annotation. Classes that YAML cannot express are ignored."""
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
            elif origin in _TYPE_NAMES:
                kinds.add(origin)
        if choices:
            # `SomeEnum | str` means the enum, or the text of one of its members.
            kinds.discard(str)
        return cls(frozenset(kinds), tuple(choices), type(None) in members)

    def __str__(self) -> str:
        parts = [name for kind, name in _TYPE_NAMES.items() if kind in self.kinds]
        if self.choices:
            parts.append(f"one of {', '.join(self.choices)}")
        return " or ".join(parts + ["null"] * self.is_optional) or "nothing that a recipe can hold"

    def fit(self, value: Any) -> Any:
        """Convert a value read from YAML to this type.

        Raises:
            TypeError: If it does not fit.
        """
        match value:
            case None if self.is_optional:
                return None
            case bool() if bool in self.kinds:
                return value
            case int() if self.kinds & {int, float} and not isinstance(value, bool):
                return value
            case float() if float in self.kinds:
                return value
            case float() if int in self.kinds and value.is_integer():
                return int(value)
            case str() if value in self.choices:
                return value
            case str() if bool in self.kinds and value.lower() in _BOOLEAN_WORDS:
                return _BOOLEAN_WORDS[value.lower()]
            case str() if str in self.kinds:
                return value
            case str() if list in self.kinds:
                return _split(value)
            case list() if list in self.kinds and all(isinstance(item, str) for item in value):
                return value
            case dict() if dict in self.kinds:
                return value
        raise TypeError(f"The value must be {self}, got {value!r}.")


def fit_value(field: str, value: Any, value_type: ValueType, where: str) -> Any:
    """Convert a value read from YAML to the type of its field.

    Raises:
        ValueError: If it does not fit.
    """
    try:
        return value_type.fit(value)
    except TypeError:
        raise ValueError(
            f"`{field}` must be {value_type}, got {value!r} ({type(value).__name__}) in {where}."
        ) from None


def fit_words(field: str, words: list[str], value_type: ValueType, where: str) -> Any:
    """Convert the words that follow an option on the command line to the type of its field.

    No word means true, several are a list. One word may hold a list, separated by commas or spaces, or YAML.

    Raises:
        ValueError: If they do not fit.
    """
    if len(words) > 1 and not value_type.kinds & {list, dict}:
        raise ValueError(
            f"`{field}` must have one value, got {' '.join(words)} ({where}). A recipe or file stands before all options."
        )
    if len(words) != 1:
        parts = [part for word in words for part in _split(word)]
        return fit_value(field, parts if words else True, value_type, where)
    [word] = words
    is_text = word in value_type.choices or value_type.kinds == {str}
    if is_text and not (word == "null" and value_type.is_optional):
        return word
    try:
        value = load_yaml(word, "")
        return value_type.fit(word if isinstance(value, str) else value)
    except (ValueError, TypeError):
        return fit_value(field, word, value_type, where)


def parse_words(words: list[str]) -> Any:
    """Parse the words after a dotted option, whose type is unknown here, as YAML."""
    if not words:
        return True
    parsed = [load_yaml(word, f"{word!r}") for word in words]
    return parsed[0] if len(parsed) == 1 else parsed


def _split(text: str) -> list[str]:
    return re.findall(r"[^,\s]+", text)

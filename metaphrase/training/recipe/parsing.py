"""Strict YAML of recipes: the scalars of YAML 1.2, and each key once.

`no` and `on` are texts, `1e-3` is a number, and `1:30` and dates are texts.
"""

import re
import typing
from typing import Any

import yaml

# Pattern of each kind of scalar, and the letters it may begin with ("" for an empty scalar).
_SCALARS = {
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?[0-9]+", [*"-+0123456789"]),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)", [*"-+.0123456789"]),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if not isinstance(key, str) or keys.count(key) > 1:
                problem = (
                    f"the key `{key}` occurs twice" if isinstance(key, str) else f"a key must be a name, got {key!r}"
                )
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
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
    """Parse one YAML document, or raise a `ValueError`: if it is no YAML, or has a key twice or one that is not a text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        # PyYAML does not catch the errors of `!!bool abc` and the like.
        raise ValueError(f"{where} must be valid YAML: {' '.join(str(error).split())}") from error


def dump_yaml(mapping: dict[str, Any]) -> str:
    """Return YAML from which `load_yaml` reads an equal mapping, in the same order."""
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)

"""Exact conversion of weights from and to other families."""

from typing import Any

from metaphrase.plugins import import_name

# Modules are imported at the first use: a choice of an engine needs CTranslate2's alone.
_NAMES = {
    "FAMILIES": "metaphrase.conversion.families",
    "adapt": "metaphrase.conversion.adaptation",
    "convert": "metaphrase.conversion.folders",
    "from_torch_transformer": "metaphrase.conversion.torch_transformer",
    "to_torch_transformer": "metaphrase.conversion.torch_transformer",
    "trim_vocabulary": "metaphrase.conversion.trimmed_vocabulary",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_name(f"{_NAMES[name]}:{name}")

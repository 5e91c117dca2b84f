"""Model card of a trained folder, its pictures and its upload."""

from typing import Any

from metaphrase.hub_card.card import Facts, renew_model_card, write_model_card
from metaphrase.hub_card.figures import draw_training_curve
from metaphrase.plugins import PUBLIC_NAMES, import_name

_NAMES_OF_RINGS = PUBLIC_NAMES["metaphrase.hub_card"]

__all__ = ["Facts", "draw_training_curve", "renew_model_card", "write_model_card", *_NAMES_OF_RINGS]


def __getattr__(name: str) -> Any:
    if name not in _NAMES_OF_RINGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_name(f"{_NAMES_OF_RINGS[name]}:{name}")

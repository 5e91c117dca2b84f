"""Model card of a trained folder, its pictures and its upload."""

from metaphrase.hub_card.card import Facts, renew_model_card, write_model_card
from metaphrase.hub_card.figures import draw_training_curve
from metaphrase.plugins import names_of_rings

_NAMES_OF_RINGS, __getattr__ = names_of_rings(__name__)

__all__ = ["Facts", "draw_training_curve", "renew_model_card", "write_model_card", *_NAMES_OF_RINGS]

"""Model card of a trained folder, its pictures, its upload, and the explanation page."""

from metaphrase.hub_card.card import renew_model_card, write_model_card
from metaphrase.hub_card.explanation_page import write_explanation_page
from metaphrase.hub_card.facts import Facts
from metaphrase.hub_card.figures import draw_attention_map, draw_training_curve

__all__ = ["Facts", "draw_attention_map", "draw_training_curve", "renew_model_card", "write_explanation_page"]
__all__ += ["write_model_card"]

"""Model card of a trained folder, its pictures, its upload, and the explanation page."""

from metaphrase.hub_card.card import Facts, renew_model_card, write_model_card
from metaphrase.hub_card.figures import draw_attention_map, draw_training_curve
from metaphrase.hub_card.pages import write_explanation_page

__all__ = ["Facts", "draw_attention_map", "draw_training_curve", "renew_model_card", "write_explanation_page"]
__all__ += ["write_model_card"]

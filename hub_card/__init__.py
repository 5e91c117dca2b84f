"""Model card of a trained folder, its pictures, its upload, and the attention page."""

from metaphrase.hub_card.attention_page import write_attention_page
from metaphrase.hub_card.card import renew_model_card, write_model_card
from metaphrase.hub_card.facts import Facts
from metaphrase.hub_card.figures import draw_attention_map, draw_training_curve

__all__ = ["Facts", "draw_attention_map", "draw_training_curve", "renew_model_card", "write_attention_page"]
__all__ += ["write_model_card"]

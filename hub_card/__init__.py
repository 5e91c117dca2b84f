"""The model card of a trained folder, its pictures, and the page that attention can be looked into with."""

from metaphrase.hub_card.attention_page import write_attention_page
from metaphrase.hub_card.card import renew_model_card, write_model_card
from metaphrase.hub_card.figures import draw_attention_map, draw_training_curve

__all__ = ["draw_attention_map", "draw_training_curve", "renew_model_card", "write_attention_page", "write_model_card"]

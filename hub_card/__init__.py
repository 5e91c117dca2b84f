"""The model card of a trained folder, and its pictures."""

from metaphrase.hub_card.card import write_model_card
from metaphrase.hub_card.figures import draw_attention_map, draw_training_curve

__all__ = ["draw_attention_map", "draw_training_curve", "write_model_card"]

"""The model card of a trained folder, and its pictures."""

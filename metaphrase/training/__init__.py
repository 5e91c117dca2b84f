"""Training: pairs to batches to loss to checkpoints, and what they are worth."""

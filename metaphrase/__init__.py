"""Sequence-to-sequence Transformers for the Hugging Face stack."""

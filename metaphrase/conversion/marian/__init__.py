"""Conversion from and to Marian's own files."""

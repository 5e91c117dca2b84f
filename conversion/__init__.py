"""Conversion: weights of other families in and out, exactly, and nothing is ever unpickled."""

from metaphrase.conversion.families import FAMILIES
from metaphrase.conversion.folders import convert

__all__ = ["FAMILIES", "convert"]

"""Exact conversion of weights from and to other families."""

from metaphrase.conversion.adaptation import adapt
from metaphrase.conversion.families import FAMILIES
from metaphrase.conversion.folders import convert
from metaphrase.conversion.torch_transformer import from_torch_transformer, to_torch_transformer
from metaphrase.conversion.trimmed_vocabulary import trim_vocabulary

__all__ = ["FAMILIES", "adapt", "convert", "from_torch_transformer", "to_torch_transformer", "trim_vocabulary"]

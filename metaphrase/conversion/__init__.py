"""Exact conversion of weights from and to other families."""

from metaphrase.plugins import names_of_rings

# Modules are imported at the first use: a choice of an engine needs CTranslate2's alone.
_NAMES, __getattr__ = names_of_rings(__name__)
__all__ = list(_NAMES)

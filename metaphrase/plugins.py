"""The places of the core where the outer rings plug in.

The core imports no ring. It names a place, and uses the function there, or goes on without it if the ring was taken away.
docs/house.md has a picture of core and rings.
"""

import importlib
from collections.abc import Callable
from typing import Any

# Module and name, by the place. A ring is imported when its place is used for the first time.
PLACES: dict[str, str] = {
    "training_operators": "metaphrase.ops.packed_stacks:plug_in",
    "projected_loss": "metaphrase.ops.projected_loss:loss_of_head",
    "fast_decoder": "metaphrase.decoding.fast_generation:plug_in",
}

# Public names of a core package that rings hold: the module by the name.
PUBLIC_NAMES = {
    "metaphrase.inference": {
        "AttentionMap": "metaphrase.analysis.alignment",
        "EnsembleSearch": "metaphrase.decoding.searches.joint_search",
        "Explanation": "metaphrase.analysis.explanation",
        "GeneratorPool": "metaphrase.engines.generator_pool",
        "Partner": "metaphrase.decoding.searches.joint_search",
        "SpeculativeSearch": "metaphrase.decoding.searches.joint_search",
        "Terms": "metaphrase.texts.plan",
        "TextDecoder": "metaphrase.texts.whole_texts",
        "alignment_error_rate": "metaphrase.analysis.alignment",
        "constrained_beam_search": "metaphrase.decoding.searches.constrained_beam_search",
        "cross_attention": "metaphrase.analysis.alignment",
        "cross_attentions": "metaphrase.analysis.alignment",
        "explain": "metaphrase.analysis.explanation",
        "format_pharaoh": "metaphrase.analysis.alignment",
        "quantize": "metaphrase.decoding.quantization",
        "word_alignment": "metaphrase.analysis.alignment",
        "word_weights": "metaphrase.analysis.alignment",
    },
}


def import_name(path: str) -> Any:
    """Return what a module holds by a name: `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def plugin(place: str) -> Callable[..., Any] | None:
    """Return the function that a ring has put into a place, or None if that ring was taken away."""
    try:
        return import_name(PLACES[place])
    except ModuleNotFoundError as error:
        # Another name is a package that the ring needs: an extra that is not installed.
        if error.name is None or not (PLACES[place].replace(":", ".")).startswith(error.name + "."):
            raise
        return None


def needed_plugin(place: str, option: str) -> Callable[..., Any]:
    """Return the function in a place. Raises `ValueError` that names `option` if its ring was taken away."""
    function = plugin(place)
    if function is None:
        module = PLACES[place].partition(":")[0]
        raise ValueError(f"`{option}` must be left out: it needs {module}, which this copy of the package lacks.")
    return function

"""Registry of all families."""

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from metaphrase.conversion.bart import Bart, MBart, PLBart
from metaphrase.conversion.family import Family
from metaphrase.conversion.marian import FSMT, M2M100, Marian, Pegasus
from metaphrase.conversion.t5 import MT5, T5, UMT5
from metaphrase.tokenization.hints import did_you_mean

FAMILIES: dict[str, Family] = {
    family.name: family() for family in (T5, MT5, UMT5, Bart, MBart, PLBart, Pegasus, Marian, M2M100, FSMT)
}


def find_family(name: str) -> Family:
    """Return the family of a name.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in FAMILIES:
        raise ValueError(f"A family must be one of {', '.join(FAMILIES)}, got {name!r}.{did_you_mean(name, FAMILIES)}")
    return FAMILIES[name]


def config_class(family: Family) -> type[PreTrainedConfig]:
    return getattr(transformers, family.config_class)


def model_class(family: Family) -> type[PreTrainedModel]:
    return getattr(transformers, family.model_class)

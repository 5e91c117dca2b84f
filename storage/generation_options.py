"""Options of `generate()` that commands, recipes, requests and saved settings share: type, range and meaning of each.

This file imports no library, so that the help of a command comes at once.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class GenerationOption(NamedTuple):
    """A number, truth value or name.

    Attributes:
        type: `int`, `float`, `bool`, or `str` for true, false or never.
        help: The meaning.
        low: Smallest value; None if there is none.
        high: Largest value; None if there is none.
    """

    type: type
    help: str
    low: float | None = None
    high: float | None = None


# A larger length or beam would fill the memory.
_MAX_LENGTH, _MAX_BEAMS = 2**20, 10_000
_LAST_ID = 2**31 - 1
GENERATION_OPTIONS: dict[str, GenerationOption] = {
    "max_length": GenerationOption(int, "maximum tokens of a target", 0, _MAX_LENGTH),
    "max_new_tokens": GenerationOption(int, "maximum tokens of a target, without the start token", 0, _MAX_LENGTH),
    "min_length": GenerationOption(int, "minimum tokens of a target", 0, _MAX_LENGTH),
    "min_new_tokens": GenerationOption(int, "minimum tokens of a target, without the start token", 0, _MAX_LENGTH),
    "num_beams": GenerationOption(int, "beam size; 1 is greedy search or sampling", 1, _MAX_BEAMS),
    "length_penalty": GenerationOption(float, "exponent of the length that divides the score of a beam", -10, 10),
    "num_beam_groups": GenerationOption(int, "number of beam groups for diverse beam search", 1, _MAX_BEAMS),
    "diversity_penalty": GenerationOption(
        float, "penalty of diverse beam search for a token that another group chose in this step", 0, 1e6
    ),
    "early_stopping": GenerationOption(
        str, "stop a sentence at num_beams finished candidates; never: stop when no better candidate is possible"
    ),
    "do_sample": GenerationOption(bool, "sample instead of taking the most probable token"),
    # With smaller or larger values, scores of float32 overflow or become equal.
    "temperature": GenerationOption(float, "divide the logits by this value before sampling", 1e-9, 1e9),
    "top_k": GenerationOption(
        int, "sample from the k most probable tokens; number of candidates in contrastive search", 0, _LAST_ID
    ),
    "top_p": GenerationOption(
        float, "sample from the most probable tokens with this total probability (nucleus sampling)", 1e-9, 1
    ),
    "min_p": GenerationOption(float, "sample from tokens with at least this share of the highest probability", 0, 1),
    "typical_p": GenerationOption(float, "sample from the most typical tokens with this total probability", 1e-9, 1),
    "epsilon_cutoff": GenerationOption(float, "sample from tokens with at least this probability", 0, 1 - 1e-9),
    "eta_cutoff": GenerationOption(
        float, "as epsilon_cutoff, with a lower threshold for a flat distribution", 0, 1 - 1e-9
    ),
    "top_h": GenerationOption(
        float, "sample from the most probable tokens with at most this share of the entropy", 0, 1
    ),
    "penalty_alpha": GenerationOption(
        float, "weight of the degeneration penalty in contrastive search; needs top_k", 0, 1
    ),
    "repetition_penalty": GenerationOption(float, "divide the scores of earlier tokens by this value", 1e-3, 1e3),
    "no_repeat_ngram_size": GenerationOption(int, "forbid to repeat an n-gram of this size", 0, _LAST_ID),
    "renormalize_logits": GenerationOption(
        bool, "normalize the probabilities after the other options have changed them"
    ),
    "forced_bos_token_id": GenerationOption(int, "id of the first token of every target, such as a language"),
    "forced_eos_token_id": GenerationOption(int, "id of the last token of a target at the length limit"),
    "num_return_sequences": GenerationOption(int, "number of targets for each source", 1, _MAX_BEAMS),
}
# Options that turn sampling on. With `penalty_alpha`, `top_k` belongs to contrastive search.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Check the numbers among the options of `generate()`, which may silently ignore them or fail late.

    Args:
        options: Options by name. Values that are no numbers are left to `generate()`.
        where: Origin of the options, for the error.

    Raises:
        ValueError: Naming the option, the range and the value.
    """
    for name, value in options.items():
        option = GENERATION_OPTIONS.get(name)
        if option is None or option.low is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        is_in_range = math.isfinite(value) and option.low <= value <= option.high
        if not is_in_range or (option.type is int and value != int(value)):
            kind = "a whole number" if option.type is int else "a number"
            raise ValueError(f"`{name}` must be {kind} from {option.low:g} to {option.high:g}, got {value}{where}.")


def complete_sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Set `do_sample` if an option needs it and the caller has set neither it nor a loop, and then one beam if none are set.

    A model may have beams of its own, and sampling within beams is another search.
    """
    chosen = {name for name, value in options.items() if value is not None}
    names = [name for name in _SAMPLING if name != "top_k" or "penalty_alpha" not in chosen]
    if not chosen & {"do_sample", "custom_generate"} and chosen.intersection(names):
        beams = {} if "num_beams" in chosen else {"num_beams": 1}
        return {**options, "do_sample": True, **beams}
    return dict(options)

"""Search arguments: which of the searches here the arguments of `generate()` ask for.

transformers 5 still knows these arguments, but sends whoever gives them to code on the Hub. Here they mean what they meant.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from metaphrase.decoding.options import check_ranges
from metaphrase.decoding.searches.constrained_beam_search import constrained_beam_search
from metaphrase.decoding.searches.contrastive_search import contrastive_search
from metaphrase.decoding.searches.diverse_beam_search import diverse_beam_search

DEFAULT_CONSTRAINED_BEAMS = 10


def choose_search(model: PreTrainedModel, options: dict[str, Any]) -> tuple[Callable | None, dict[str, Any]]:
    """Chooses by the arguments, and where they say nothing by the model's own settings.

    Args:
        model: Whose generation config holds its own settings.
        options: Arguments of `generate()`, in the form of `plain_options`.

    Returns:
        The search for `generate(custom_generate=...)`, or `None` for one that transformers has; and the arguments to give, with
        all that the search needs.

    Raises:
        ValueError: If arguments belong to different searches, one that a search needs is missing, or there shall be no beams
            or no targets.
    """
    check_ranges(options)
    if options.get("custom_generate") is not None:
        return None, options
    own = model.generation_config
    settings = {
        name: options[name] if options.get(name) is not None else getattr(own, name, None)
        for name in ("num_beams", "num_beam_groups", "diversity_penalty", "penalty_alpha", "force_words_ids", "top_k")
    }
    if settings["force_words_ids"] is None and options.get("first_words_ids") is not None:
        raise ValueError("`first_words_ids` must come with `force_words_ids`.")
    if options.get("constraints") is not None or getattr(own, "constraints", None) is not None:
        raise ValueError("`constraints` must be None: give the phrases as `force_words_ids`.")
    num_beams, asks_for_groups = settings["num_beams"] or 1, (settings["num_beam_groups"] or 1) > 1
    is_contrastive = options.get("penalty_alpha") is not None
    if options.get("diversity_penalty") and not asks_for_groups:
        raise ValueError(
            "`num_beam_groups` must be above 1 where `diversity_penalty` is given, "
            f"got {settings['num_beam_groups']} and {options['diversity_penalty']}."
        )
    given = [
        name
        for name, is_given in (
            ("force_words_ids", options.get("force_words_ids") is not None),
            ("penalty_alpha", is_contrastive),
            ("num_beam_groups", (options.get("num_beam_groups") or 1) > 1),
        )
        if is_given
    ]
    if len(given) > 1:
        raise ValueError(f"Arguments must ask for one search, got {' and '.join(f'`{name}`' for name in given)}.")
    if settings["force_words_ids"] is not None and given in ([], ["force_words_ids"]):
        beams = options.get("num_beams") or (num_beams if num_beams > 1 else DEFAULT_CONSTRAINED_BEAMS)
        return constrained_beam_search, {"do_sample": False} | options | {"num_beams": beams}
    # What the model itself prefers gives way to another search, as in transformers.
    is_own_contrastive = not given and settings["penalty_alpha"] and num_beams == 1 and not _samples(own, options)
    if is_contrastive or (is_own_contrastive and (settings["top_k"] or 0) > 1):
        return contrastive_search, {"do_sample": False} | options | _contrastive_options(settings, options)
    if given == ["num_beam_groups"] or (not given and asks_for_groups and num_beams > 1):
        names = ("num_beam_groups", "diversity_penalty")
        return diverse_beam_search, {"do_sample": False} | options | {name: settings[name] for name in names}
    return None, options


def _samples(own: Any, options: dict[str, Any]) -> bool:
    return bool(options["do_sample"] if options.get("do_sample") is not None else own.do_sample)


def _contrastive_options(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    if (options.get("num_beams") or 1) != 1:
        raise ValueError(f"`num_beams` must be 1 where `penalty_alpha` is given, got {options['num_beams']}.")
    if settings["top_k"] is None:
        raise ValueError("`top_k` must be given with `penalty_alpha`: the number of candidates, such as 4.")
    return {"num_beams": 1, "penalty_alpha": settings["penalty_alpha"], "top_k": settings["top_k"]}

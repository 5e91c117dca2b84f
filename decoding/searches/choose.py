"""Choice of a search from the arguments of `generate()`.

transformers 5 moved these searches to code on the Hub. Here their arguments keep the meaning of transformers 4.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from metaphrase.decoding.searches.constrained_beam_search import constrained_beam_search
from metaphrase.decoding.searches.contrastive_search import contrastive_search
from metaphrase.decoding.searches.diverse_beam_search import diverse_beam_search

DEFAULT_CONSTRAINED_BEAMS = 10


def choose_search(model: PreTrainedModel, options: dict[str, Any]) -> tuple[Callable | None, dict[str, Any]]:
    """Choose a search by the arguments, or else by the model's generation config.

    Args:
        model: The model to generate with.
        options: Arguments of `generate()`, from `plain_options`.

    Returns:
        The search for `generate(custom_generate=...)`, or None for a search of transformers; and the arguments to pass.

    Raises:
        ValueError: If arguments belong to different searches, a search lacks one, or a number is out of range.
    """
    if options.get("custom_generate") is not None:
        return None, options
    defaults = model.generation_config
    settings = {
        name: options[name] if options.get(name) is not None else getattr(defaults, name, None)
        for name in ("num_beams", "num_beam_groups", "diversity_penalty", "penalty_alpha", "force_words_ids", "top_k")
    }
    if settings["force_words_ids"] is None and options.get("first_words_ids") is not None:
        raise ValueError("`first_words_ids` must come with `force_words_ids`.")
    if options.get("constraints") is not None or getattr(defaults, "constraints", None) is not None:
        raise ValueError("`constraints` must be None: give the phrases as `force_words_ids`.")
    num_beams, has_groups = settings["num_beams"] or 1, (settings["num_beam_groups"] or 1) > 1
    if options.get("diversity_penalty") and not has_groups:
        raise ValueError(
            "`num_beam_groups` must be above 1 where `diversity_penalty` is given, "
            f"got {settings['num_beam_groups']} and {options['diversity_penalty']}."
        )
    chosen = [name for name in ("force_words_ids", "penalty_alpha") if options.get(name) is not None]
    chosen += ["num_beam_groups"] * ((options.get("num_beam_groups") or 1) > 1)
    if len(chosen) > 1:
        raise ValueError(f"Arguments must choose one search, got {' and '.join(f'`{name}`' for name in chosen)}.")
    if settings["force_words_ids"] is not None and chosen in ([], ["force_words_ids"]):
        beams = options.get("num_beams") or (num_beams if num_beams > 1 else DEFAULT_CONSTRAINED_BEAMS)
        return constrained_beam_search, {"do_sample": False} | options | {"num_beams": beams}
    # Arguments for another search override the model's preference, as in transformers.
    do_sample = options["do_sample"] if options.get("do_sample") is not None else defaults.do_sample
    prefers_contrastive = not chosen and settings["penalty_alpha"] and num_beams == 1 and not do_sample
    if chosen == ["penalty_alpha"] or (prefers_contrastive and (settings["top_k"] or 0) > 1):
        if (options.get("num_beams") or 1) != 1:
            raise ValueError(f"`num_beams` must be 1 where `penalty_alpha` is given, got {options['num_beams']}.")
        if settings["top_k"] is None:
            raise ValueError("`top_k` must be set with `penalty_alpha`: the number of candidates, such as 4.")
        contrast = {name: settings[name] for name in ("penalty_alpha", "top_k")}
        return contrastive_search, {"do_sample": False} | options | contrast | {"num_beams": 1}
    if chosen == ["num_beam_groups"] or (not chosen and has_groups and num_beams > 1):
        names = ("num_beam_groups", "diversity_penalty")
        return diverse_beam_search, {"do_sample": False} | options | {name: settings[name] for name in names}
    return None, options

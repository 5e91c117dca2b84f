"""What `generate()` is asked for, in the words of CTranslate2: the same search, or a refusal by name."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from metaphrase.decoding.options import plain_options

logger = logging.getLogger(__name__)

# For sampling alone; without it transformers does not look at them either.
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_UNDERSTOOD = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "num_beams", "length_penalty"),
    *("num_return_sequences", "repetition_penalty", "no_repeat_ngram_size", "renormalize_logits", "do_sample"),
    *("temperature", "top_k", "top_p", "forced_bos_token_id", "decoder_start_token_id", "eos_token_id"),
    *("bad_words_ids", "suppress_tokens", "forced_eos_token_id"),
}
# These change no text: what is returned beside it, how caches are kept, and settings of what is not asked for.
_WITHOUT_EFFECT = {
    *("bos_token_id", "pad_token_id", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("remove_invalid_values", "compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("max_matching_ngram_size", "prefill_chunk_size", "synced_gpus", "transformers_version"),
}
# Values with which an option that is not understood does nothing.
_NEUTRAL: dict[str, tuple] = {
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "min_p": (0.0,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "token_healing": (False,),
    "typical_p": (1.0,),
    "use_mtp": (False,),
}
# CTranslate2 takes an exponent of 0 for a leave to stop early. This one is as good as 0: no length is changed by it.
_ZERO_EXPONENT = 1e-30


@dataclass(frozen=True)
class Search:
    """A search, as CTranslate2 is told of it.

    Attributes:
        options: Arguments of `translate_batch`.
        start: The id of what each target starts with.
        forced: The ids that each target begins with after that.
        ends: The ids that end a target.
        suppressed: Ids that no target has in this order.
        forced_end: The id in place of the last one of a target that meets the length limit, if there is one.
        is_sampling: Whether it draws tokens.
    """

    options: dict[str, Any]
    start: int | None
    forced: list[int]
    ends: list[int]
    suppressed: list[list[int]]
    forced_end: int | None
    is_sampling: bool


def translate_options(
    own: GenerationConfig, given: Mapping[str, Any], *, vocab_size: int, return_scores: bool
) -> Search:
    """Puts options of `generate()` into the words of CTranslate2.

    Some of them mean something slightly else there. Settings under which the results are the same:

    - `early_stopping`: CTranslate2 stops a source when `num_beams` times its patience hypotheses have ended. That is True with
      a patience of 1. To go on as long as a better one is possible (`never`, or False where `length_penalty` is not above 0)
      means to go on to the longest length: the result is the same, the time is not. False with a `length_penalty` above 0
      stops on what goes on at that moment, for which CTranslate2 has no word. Where nothing is set it stops as for True.
    - `length_penalty`: the end of sequence counts in the length, in both.
    - `min_length`, `no_repeat_ngram_size`, `bad_words_ids`, `suppress_tokens`: CTranslate2 lets the other tokens share the
      probability of a token that must not come. To a greedy search it is all one; beams come out the same with
      `renormalize_logits`.
    - `repetition_penalty`: it changes logits here, and in transformers' beam search log-probabilities: only without beams.
    - `repetition_penalty`, `no_repeat_ngram_size`: the token that the decoder starts with is not among those generated before.
    - `forced_eos_token_id`: of beams, those that meet the length limit are compared, and all targets that do are scored, with
      the token in the place of which it comes.
    - `forced_bos_token_id` with beams: a target that ends right behind it must be the likeliest there to be kept.

    Args:
        own: The model's own settings.
        given: Those of this call, which come first.
        vocab_size: Entries of the target vocabulary.
        return_scores: Whether scores are wanted.

    Raises:
        ValueError: If CTranslate2 cannot do what an option asks for, or an option is out of its range.
    """
    settings = _merge(own, plain_options(given))
    beams, count = settings["num_beams"], settings["num_return_sequences"]
    is_sampling = bool(settings["do_sample"])
    for name in ("num_beams", "num_return_sequences"):
        _require(name, settings, settings[name] >= 1, "at least 1")
    _require("do_sample", settings, not is_sampling or beams == 1, f"False with `num_beams` {beams} for CTranslate2")
    limit = beams if not is_sampling else count
    _require("num_return_sequences", settings, count <= limit, f"at most `num_beams` ({beams}) without sampling")
    longest = _most_new_tokens(settings)
    shortest = _fewest_new_tokens(settings)
    if shortest > longest:
        raise ValueError(f"The fewest tokens of a target must not be above the most, got {shortest} and {longest}.")
    ends = settings["eos_token_id"]
    ends = list(ends) if isinstance(ends, (list, tuple)) else [ends]
    is_known = all(isinstance(end, int) and 0 <= end < vocab_size for end in ends)
    _require("eos_token_id", settings, bool(ends) and is_known, f"ids from 0 to {vocab_size - 1} for CTranslate2")
    suppressed = _suppressed(settings, ends, vocab_size)
    forced_end = settings["forced_eos_token_id"]
    _require(
        "forced_eos_token_id", settings, forced_end in (None, *ends), f"one of `eos_token_id` {ends} for CTranslate2"
    )
    options: dict[str, Any] = {
        "beam_size": beams,
        "num_hypotheses": count,
        "max_decoding_length": longest,
        "min_decoding_length": shortest,
        "repetition_penalty": float(settings["repetition_penalty"]),
        "no_repeat_ngram_size": settings["no_repeat_ngram_size"],
        "length_penalty": 0.0,
    }
    _require("repetition_penalty", settings, options["repetition_penalty"] >= 1, "at least 1 for CTranslate2")
    if beams > 1:
        _require("eos_token_id", settings, len(ends) == 1, "one id with `num_beams` above 1 for CTranslate2")
        options |= _beam_options(settings, longest, shortest)
    if is_sampling:
        options |= _sampling_options(settings, vocab_size, return_scores)
    forced = [] if settings["forced_bos_token_id"] is None else [settings["forced_bos_token_id"]]
    return Search(options, settings["decoder_start_token_id"], forced, ends, suppressed, forced_end, is_sampling)


def _merge(own: GenerationConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings: those given, else the model's own, else transformers' defaults.

    Raises:
        ValueError: If there is one that CTranslate2 does not know, and that does something.
    """
    defaults = GenerationConfig._get_default_generation_params()
    known = {name: value for name, value in own.to_dict().items() if not name.startswith("_")}
    settings = {**known, **given}
    # Whether these two were set makes a difference.
    unset = ("early_stopping", "max_length")
    for name, value in defaults.items():
        if settings.get(name) is None and name not in unset:
            settings[name] = value
    for name in _UNDERSTOOD:
        settings.setdefault(name, None)
    refused = [
        f"`{name}` {value!r}"
        for name, value in settings.items()
        if name not in _UNDERSTOOD | _WITHOUT_EFFECT
        and value is not None
        and value not in _NEUTRAL.get(name, ())
        and value not in ([], {})
        and (settings["do_sample"] or name not in _SAMPLING_ONLY)
    ]
    if refused:
        raise ValueError(
            f"CTranslate2 cannot do {', '.join(sorted(refused))}. Where it is one of the model's own settings, give None for it."
        )
    return settings


def _require(name: str, settings: Mapping[str, Any], holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {rule}, got {settings[name]}.")


def _most_new_tokens(settings: Mapping[str, Any]) -> int:
    if settings["max_new_tokens"] is not None:
        _require("max_new_tokens", settings, settings["max_new_tokens"] >= 1, "at least 1")
        return settings["max_new_tokens"]
    if settings["max_length"] is None:
        return GenerationConfig._get_default_generation_params()["max_length"]
    _require("max_length", settings, settings["max_length"] >= 2, "at least 2, the start token being counted")
    return settings["max_length"] - 1


def _fewest_new_tokens(settings: Mapping[str, Any]) -> int:
    """So many tokens come before an end of sequence may."""
    if settings["min_new_tokens"] is not None:
        return max(0, settings["min_new_tokens"])
    return max(0, (settings["min_length"] or 0) - 1)


def _beam_options(settings: Mapping[str, Any], longest: int, shortest: int) -> dict[str, Any]:
    penalty = float(settings["length_penalty"])
    beams = settings["num_beams"]
    rule = f"1 with `num_beams` {beams} for CTranslate2"
    _require("repetition_penalty", settings, settings["repetition_penalty"] == 1, rule)
    if not settings["renormalize_logits"]:
        what = "`renormalize_logits` True must come with it for CTranslate2, which always renormalizes"
        if shortest > 0:
            name = "min_length" if settings["min_new_tokens"] is None else "min_new_tokens"
            raise ValueError(f"`{name}` is {settings[name]} and `num_beams` {beams}: {what}.")
        for name in ("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"):
            if settings[name]:
                raise ValueError(f"`{name}` is {settings[name]} and `num_beams` {beams}: {what}.")
    return {"length_penalty": penalty or _ZERO_EXPONENT, "patience": _patience(settings, penalty, longest)}


def _suppressed(settings: Mapping[str, Any], ends: list[int], vocab_size: int) -> list[list[int]]:
    """Ids that must not follow one another, or not come at all; as in transformers, a bad word that is an end does not count."""
    rows = {
        "suppress_tokens": [[token] for token in settings["suppress_tokens"] or ()],
        "bad_words_ids": [
            list(word) for word in settings["bad_words_ids"] or () if list(word) not in [[end] for end in ends]
        ],
    }
    for name, words in rows.items():
        is_known = all(
            word and all(isinstance(token, int) and 0 <= token < vocab_size for token in word) for word in words
        )
        _require(name, settings, is_known, f"ids from 0 to {vocab_size - 1}")
    return [word for words in rows.values() for word in words]


def _patience(settings: Mapping[str, Any], penalty: float, longest: int) -> float:
    """How many times `num_beams` hypotheses must have ended."""
    early_stopping = settings["early_stopping"]
    if early_stopping is True:
        return 1.0
    if early_stopping == "never" or penalty <= 0:
        # More than can end before the last step.
        return longest + 1.0
    if early_stopping is None:
        logger.warning(
            "`early_stopping` is not set: CTranslate2 stops a sentence as soon as it has num_beams candidates, as for True."
        )
        return 1.0
    raise ValueError(
        "`early_stopping` must be True or 'never' with `length_penalty` above 0 for CTranslate2, "
        f"got {early_stopping} and {penalty}."
    )


def _sampling_options(settings: Mapping[str, Any], vocab_size: int, return_scores: bool) -> dict[str, Any]:
    temperature, top_p = float(settings["temperature"]), float(settings["top_p"])
    top_k = min(settings["top_k"], vocab_size)
    _require("temperature", settings, temperature > 0, "above 0")
    _require("top_p", settings, 0 < top_p <= 1, "above 0 and at most 1 for CTranslate2")
    _require("top_k", settings, top_k >= 0, "at least 0")
    if return_scores and (temperature != 1 or 0 < top_k < vocab_size or top_p != 1):
        raise ValueError(
            "Scores of sampled targets must be those of what was drawn from, but CTranslate2 knows the model's own alone: set "
            f"`temperature` 1, `top_k` 0 and `top_p` 1, got {temperature}, {top_k} and {top_p}; or, in Python, leave "
            "`return_scores` False (the command line needs scores where it writes several targets of a source)."
        )
    return {"sampling_temperature": temperature, "sampling_topk": top_k, "sampling_topp": top_p}

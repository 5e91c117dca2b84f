"""Translate options of `generate()` into those of CTranslate2, or refuse them by name."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from metaphrase.decoding.options import plain_options

logger = logging.getLogger(__name__)

# Options that transformers, too, ignores without sampling.
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_UNDERSTOOD = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "num_beams", "length_penalty"),
    *("num_return_sequences", "repetition_penalty", "no_repeat_ngram_size", "renormalize_logits", "do_sample"),
    *("temperature", "top_k", "top_p", "forced_bos_token_id", "decoder_start_token_id", "eos_token_id"),
    *("bad_words_ids", "suppress_tokens", "forced_eos_token_id"),
}
# Options that do not change the text: additional outputs, caches, and settings of searches that are not used.
_WITHOUT_EFFECT = {
    *("bos_token_id", "pad_token_id", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("remove_invalid_values", "compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("max_matching_ngram_size", "prefill_chunk_size", "synced_gpus", "transformers_version"),
}
# Values that switch an unsupported option off.
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
# CTranslate2 stops early with a length penalty of 0. This one has the same effect on scores as 0.
_ZERO_EXPONENT = 1e-30


@dataclass(frozen=True)
class Search:
    """A search in terms of CTranslate2.

    Attributes:
        options: Arguments of `translate_batch`.
        start: Id of the start token.
        forced: Ids that each target begins with after the start token.
        ends: Ids that end a target.
        suppressed: Sequences of ids that no target contains.
        forced_end: Id that replaces the last one of a target at the length limit, or `None`.
        is_sampling: True if tokens are sampled.
    """

    options: dict[str, Any]
    start: int | None
    forced: list[int]
    ends: list[int]
    suppressed: list[list[int]]
    forced_end: int | None
    is_sampling: bool


def translate_options(config: GenerationConfig, options: Mapping[str, Any], *, vocab_size: int) -> Search:
    """Translate options of `generate()` into those of CTranslate2.

    Some options differ slightly:

    - `early_stopping`: CTranslate2 stops a source when `num_beams` times its patience hypotheses have ended. True is a patience
      of 1. `never`, and False with `length_penalty` at most 0, run to the longest length: same result, more time. False with
      `length_penalty` above 0 has no counterpart. Without a value it stops as for True.
    - `length_penalty`: both count the end of sequence in the length.
    - `min_length`, `no_repeat_ngram_size`, `bad_words_ids`, `suppress_tokens`: CTranslate2 renormalizes without the forbidden
      tokens. Greedy search gives the same result, beam search only with `renormalize_logits`.
    - `repetition_penalty`: CTranslate2 changes logits, transformers' beam search log-probabilities. Only without beams.
    - `repetition_penalty`, `no_repeat_ngram_size`: CTranslate2 does not count the start token as generated.
    - `forced_eos_token_id`: targets at the length limit are scored, and beams compared, with the replaced token.
    - `forced_bos_token_id` with beams: CTranslate2 keeps a target that ends right after the token only if it is the most
      probable one there.

    Args:
        config: Generation config of the model.
        options: Options of the call, which override `config`.
        vocab_size: Entries of the target vocabulary.

    Raises:
        ValueError: If CTranslate2 does not support an option, or a value is out of range.
    """
    settings = _merge(config, plain_options(options))
    beams, count = settings["num_beams"], settings["num_return_sequences"]
    is_sampling = bool(settings["do_sample"])
    for name in ("num_beams", "num_return_sequences"):
        _require(name, settings, settings[name] >= 1, "at least 1")
    _require("do_sample", settings, not is_sampling or beams == 1, f"False with `num_beams` {beams} for CTranslate2")
    limit = beams if not is_sampling else count
    _require("num_return_sequences", settings, count <= limit, f"at most `num_beams` ({beams}) without sampling")
    longest = _most_new_tokens(settings)
    shortest = settings["min_new_tokens"]
    shortest = max(0, (settings["min_length"] or 0) - 1 if shortest is None else shortest)
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
    translated: dict[str, Any] = {
        "beam_size": beams,
        "num_hypotheses": count,
        "max_decoding_length": longest,
        "min_decoding_length": shortest,
        "repetition_penalty": float(settings["repetition_penalty"]),
        "no_repeat_ngram_size": settings["no_repeat_ngram_size"],
        "length_penalty": 0.0,
    }
    _require("repetition_penalty", settings, translated["repetition_penalty"] >= 1, "at least 1 for CTranslate2")
    if beams > 1:
        _require("eos_token_id", settings, len(ends) == 1, "one id with `num_beams` above 1 for CTranslate2")
        translated |= _beam_options(settings, longest, shortest)
    if is_sampling:
        translated |= _sampling_options(settings, vocab_size)
    forced = [] if settings["forced_bos_token_id"] is None else [settings["forced_bos_token_id"]]
    return Search(translated, settings["decoder_start_token_id"], forced, ends, suppressed, forced_end, is_sampling)


def translate_exactly(config: GenerationConfig, options: Mapping[str, Any], *, vocab_size: int) -> Search:
    """Translate options of a search in which CTranslate2 finds the same tokens as torch, in float32 and in no more steps.

    Args:
        config: Generation config of the model.
        options: Options of the call, which override `config`.
        vocab_size: Entries of the target vocabulary.

    Raises:
        ValueError: If the search samples or could differ (see `translate_options`), or CTranslate2 does not support it.
    """
    early_stopping = options.get("early_stopping", config.early_stopping)
    if (options.get("num_beams", config.num_beams) or 1) > 1 and early_stopping is not True:
        # CTranslate2 stops as for True, or not before the longest length.
        shown = "not set" if early_stopping is None else early_stopping
        raise ValueError(f"CTranslate2 ends beams as with `--early_stopping`, which is {shown}")
    search = translate_options(config, options, vocab_size=vocab_size)
    has_beams = search.options["beam_size"] > 1
    differences = {
        "do_sample": search.is_sampling,
        "repetition_penalty": search.options["repetition_penalty"] != 1,
        "no_repeat_ngram_size": search.options["no_repeat_ngram_size"] > 0,
        "bad_words_ids": any(search.start in word for word in search.suppressed),
        "forced_bos_token_id": has_beams and search.forced,
        "forced_eos_token_id": search.forced_end is not None,
    }
    if names := [f"`{name}`" for name, is_different in differences.items() if is_different]:
        raise ValueError(f"CTranslate2 could write other tokens with {' and '.join(names)}")
    return search


def _merge(config: GenerationConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options of the call, the model's generation config and transformers' defaults, in this order.

    Raises:
        ValueError: If an option that CTranslate2 does not support has an effect.
    """
    defaults = GenerationConfig._get_default_generation_params()
    settings = {name: value for name, value in config.to_dict().items() if not name.startswith("_")} | dict(options)
    # These two stay `None`, to tell an unset value from the default.
    for name, value in defaults.items():
        if settings.get(name) is None and name not in ("early_stopping", "max_length"):
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
            f"CTranslate2 does not support {', '.join(sorted(refused))}. Set None to override the model's generation config."
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
    _require("max_length", settings, settings["max_length"] >= 2, "at least 2, start token included")
    return settings["max_length"] - 1


def _beam_options(settings: Mapping[str, Any], longest: int, shortest: int) -> dict[str, Any]:
    penalty = float(settings["length_penalty"])
    beams = settings["num_beams"]
    rule = f"1 with `num_beams` {beams} for CTranslate2"
    _require("repetition_penalty", settings, settings["repetition_penalty"] == 1, rule)
    if not settings["renormalize_logits"]:
        length = "min_length" if settings["min_new_tokens"] is None else "min_new_tokens"
        for name in (length, "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"):
            if shortest > 0 if name == length else settings[name]:
                raise ValueError(
                    f"`renormalize_logits` must be True for CTranslate2 with `{name}` {settings[name]} and `num_beams` "
                    f"{beams}, because CTranslate2 always renormalizes, got {settings['renormalize_logits']}."
                )
    return {"length_penalty": penalty or _ZERO_EXPONENT, "patience": _patience(settings, penalty, longest)}


def _suppressed(settings: Mapping[str, Any], ends: list[int], vocab_size: int) -> list[list[int]]:
    """Return forbidden sequences of ids. As in transformers, a bad word that is an end of sequence is ignored."""
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
    """Return CTranslate2's patience: `num_beams` times this number of hypotheses must end before a source stops."""
    early_stopping = settings["early_stopping"]
    if early_stopping is True:
        return 1.0
    if early_stopping == "never" or penalty <= 0:
        # More hypotheses than can end before the last decoding step.
        return longest + 1.0
    if early_stopping is None:
        logger.warning(
            "`early_stopping` is not set: CTranslate2 stops a sentence after num_beams finished hypotheses, as for True."
        )
        return 1.0
    raise ValueError(
        "`early_stopping` must be True or 'never' with `length_penalty` above 0 for CTranslate2, "
        f"got {early_stopping} and {penalty}."
    )


def _sampling_options(settings: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    temperature, top_p = float(settings["temperature"]), float(settings["top_p"])
    top_k = min(settings["top_k"], vocab_size)
    _require("temperature", settings, temperature > 0, "above 0")
    _require("top_p", settings, 0 < top_p <= 1, "above 0 and at most 1 for CTranslate2")
    _require("top_k", settings, top_k >= 0, "at least 0")
    return {"sampling_temperature": temperature, "sampling_topk": top_k, "sampling_topp": top_p}

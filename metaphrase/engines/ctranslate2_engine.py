"""Decode an exported model with CTranslate2: options of `generate()` in its terms, and an engine over its `Translator`."""

import functools
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from metaphrase.conversion.ctranslate2 import ctranslate2, export_ctranslate2
from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import LONGER_SOURCES, GenerateBatch, Hypothesis
from metaphrase.storage.folders import read_json
from metaphrase.storage.loading import is_exported

logger = logging.getLogger(__name__)

# Options that transformers, too, ignores without sampling.
_SAMPLING_ONLY = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
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
    *("max_matching_ngram_size", "prefill_chunk_size", "synced_gpus", "transformers_version", *LONGER_SOURCES),
}
# CTranslate2 stops early with a length penalty of 0. This one has the same effect on scores as 0.
_ZERO_EXPONENT = 1e-30


class Search(NamedTuple):
    """A search in terms of CTranslate2."""

    options: dict[str, Any]  # arguments of `translate_batch`
    start: int | None  # id of the start token
    forced: list[int]  # ids that each target begins with after the start token
    ends: list[int]
    suppressed: list[list[int]]  # sequences of ids that no target contains
    forced_end: int | None  # id that replaces the last one of a target at the length limit
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

    The options of the call override those of the generation config. `MetaphraseError` for one that CTranslate2 does not support.
    """
    settings = _merge(config, options)
    beams, count, is_sampling = settings["num_beams"], settings["num_return_sequences"], bool(settings["do_sample"])
    _require("do_sample", settings, not is_sampling or beams == 1, f"False with `num_beams` {beams}")
    _require("num_return_sequences", settings, is_sampling or count <= beams, f"at most `num_beams` ({beams})")
    longest, shortest = settings["max_new_tokens"], settings["min_new_tokens"]
    if longest is None:
        longest = 20 if settings["max_length"] is None else settings["max_length"] - 1
    if shortest is None:
        shortest = max(0, settings["min_length"] - 1)
    settings["max_new_tokens"] = longest
    _require("max_new_tokens", settings, 1 <= longest >= shortest, f"at least 1 and the fewest tokens, {shortest},")
    ends = settings["eos_token_id"]
    ends = list(ends) if isinstance(ends, list | tuple) else [ends]
    is_known = all(isinstance(end, int) and 0 <= end < vocab_size for end in ends)
    _require("eos_token_id", settings, bool(ends) and is_known, f"ids from 0 to {vocab_size - 1}")
    forced_end = settings["forced_eos_token_id"]
    _require("forced_eos_token_id", settings, forced_end in (None, *ends), f"one of `eos_token_id` {ends}")
    _require("repetition_penalty", settings, settings["repetition_penalty"] >= 1, "at least 1")
    translated: dict[str, Any] = {
        "beam_size": beams,
        "num_hypotheses": count,
        "max_decoding_length": longest,
        "min_decoding_length": shortest,
        "repetition_penalty": float(settings["repetition_penalty"]),
        "no_repeat_ngram_size": settings["no_repeat_ngram_size"],
        "length_penalty": 0.0,
    }
    if beams > 1:
        _require("eos_token_id", settings, len(ends) == 1, "one id with `num_beams` above 1")
        _require("repetition_penalty", settings, settings["repetition_penalty"] == 1, f"1 with `num_beams` {beams}")
        names = ("min_length", "min_new_tokens", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens")
        used = [name for name in names if settings[name]]
        is_equal = not used or bool(settings["renormalize_logits"])
        _require("renormalize_logits", settings, is_equal, f"True with `num_beams` {beams} and {', '.join(used)}")
        penalty, early_stopping = float(settings["length_penalty"]), settings["early_stopping"]
        is_known = early_stopping in (True, None, "never") or penalty <= 0
        _require("early_stopping", settings, is_known, f"True or 'never' with `length_penalty` {penalty}")
        # CTranslate2 stops a source when its patience times `num_beams` hypotheses have ended.
        patience = 1.0
        if early_stopping is not True and (early_stopping == "never" or penalty <= 0):
            # More hypotheses than can end before the last decoding step.
            patience = longest + 1.0
        elif early_stopping is None:
            logger.warning("`early_stopping` is not set: CTranslate2 stops as for True, after num_beams hypotheses.")
        translated |= {"length_penalty": penalty or _ZERO_EXPONENT, "patience": patience}
    if is_sampling:
        translated["sampling_temperature"] = float(settings["temperature"])
        translated |= {"sampling_topk": min(settings["top_k"], vocab_size), "sampling_topp": float(settings["top_p"])}
    forced = [] if settings["forced_bos_token_id"] is None else [settings["forced_bos_token_id"]]
    # transformers, too, ignores a bad word that is an end of sequence.
    suppressed = [list(word) for word in settings["bad_words_ids"] or () if list(word) not in [[end] for end in ends]]
    suppressed += [[token] for token in settings["suppress_tokens"] or ()]
    return Search(translated, settings["decoder_start_token_id"], forced, ends, suppressed, forced_end, is_sampling)


def translate_exactly(config: GenerationConfig, options: Mapping[str, Any], *, vocab_size: int) -> Search:
    """Translate options of a search in which CTranslate2 finds the same tokens as torch, in float32 and in no more steps.

    `MetaphraseError` for a search that samples, could differ (see `translate_options`), or that CTranslate2 does not support.
    """
    early_stopping = options.get("early_stopping", config.early_stopping)
    if (options.get("num_beams", config.num_beams) or 1) > 1 and early_stopping is not True:
        # CTranslate2 stops as for True, or not before the longest length.
        shown = "not set" if early_stopping is None else early_stopping
        raise MetaphraseError(f"CTranslate2 ends beams as with `--early_stopping`, which is {shown}")
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
        raise MetaphraseError(f"CTranslate2 could write other tokens with {' and '.join(names)}")
    return search


def _merge(config: GenerationConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options of the call, the model's generation config and transformers' defaults, in this order."""
    defaults = GenerationConfig._get_default_generation_params()
    settings = {name: value for name, value in config.to_dict().items() if not name.startswith("_")} | dict(options)
    is_sampling = settings.get("do_sample")
    ignored = _UNDERSTOOD | _WITHOUT_EFFECT | (set() if is_sampling else _SAMPLING_ONLY)
    # Zero, False and an empty list switch an option off.
    used = {name: value for name, value in settings.items() if value and value != defaults.get(name)}
    if refused := sorted(f"`{name}` {value!r}" for name, value in used.items() if name not in ignored):
        text = f"CTranslate2 does not support {', '.join(refused)}"
        raise MetaphraseError(f"{text}. Set None to override the model's generation config.")
    # These two stay `None`, to tell an unset value from the default.
    for name in _UNDERSTOOD - {"early_stopping", "max_length"}:
        if settings.get(name) is None:
            settings[name] = defaults.get(name)
    return {name: settings.get(name) for name in _UNDERSTOOD}


def _require(name: str, settings: Mapping[str, Any], holds: bool, rule: str) -> None:
    if not holds:
        raise MetaphraseError(f"`{name}` must be {rule} for CTranslate2, got {settings[name]}.")


class CTranslate2Engine:
    """Engine over a CTranslate2 folder. Takes and returns ids, which CTranslate2 sees as token strings."""

    def __init__(
        self, folder: str | os.PathLike, *, device: str | torch.device | None = None, compute_type: str = "default"
    ):
        """Load the folder of an export. The default device is a GPU if CTranslate2 finds one."""
        self.folder = Path(folder)
        if device is None:
            device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
        name, _, index = str(device).partition(":")
        self._load = functools.partial(
            ctranslate2.Translator,
            os.fspath(folder),
            device=name,
            device_index=int(index or 0),
            compute_type=compute_type,
            # Calls of several threads run at once, on all processors together. A GPU has one model.
            inter_threads=max(1, (os.cpu_count() or 1) // torch.get_num_threads()) if name == "cpu" else 1,
            intra_threads=torch.get_num_threads(),
        )
        try:
            self.translator = self._load()
        except (RuntimeError, UnicodeDecodeError) as error:
            raise MetaphraseError(f"CTranslate2 cannot load {self.folder} on {device}: {error}.") from error
        paths = [self.folder / f"{side}_vocabulary.json" for side in ("source", "target")]
        paths = paths if paths[0].is_file() else [self.folder / "shared_vocabulary.json"] * 2
        self.sources, self.targets = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
        self._target_ids = {token: index for index, token in enumerate(self.targets)}
        self._start = read_json(self.folder / CONFIG_NAME).get("decoder_start_token")
        # A copy that `EngineChoice` makes has none of its own.
        has_config = (self.folder / GENERATION_CONFIG_NAME).is_file()
        self.generation_config = GenerationConfig.from_pretrained(self.folder) if has_config else GenerationConfig()
        self._copy: tempfile.TemporaryDirectory | None = None
        # True to use the vocabulary map of the folder.
        self.use_vmap = False

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
    ) -> "CTranslate2Engine":
        """Load an exported folder, or convert a Metaphrase model into a temporary copy that lives as long as the engine.

        The dtype is a type of torch or a compute type of CTranslate2; `auto` keeps the type of the weights.
        """
        copy = None
        if not is_exported(name_or_path):
            copy = tempfile.TemporaryDirectory(prefix="metaphrase_ctranslate2_")
            name_or_path = export_ctranslate2(name_or_path, Path(copy.name) / "model")
        compute_type = "default" if dtype == "auto" else str(dtype).removeprefix("torch.")
        engine = cls(name_or_path, device=device, compute_type=compute_type)
        engine._copy = copy
        return engine

    def make_generate(self, options: Mapping[str, Any], return_scores: bool) -> GenerateBatch:
        """See `Engine`. `translate_options` lists the options that mean something else in CTranslate2."""
        search = translate_options(self.generation_config, options, vocab_size=len(self.targets))
        forced = [self.targets[index] for index in search.forced]
        start = None if search.start is None else self.targets[search.start]
        if start is None or start != (self._start or start):
            expected = "set for a model whose start varies" if self._start is None else f"that of {self._start!r}"
            raise MetaphraseError(f"`decoder_start_token_id` must be {expected}, got {search.start}.")
        # The config of the folder may state the start token.
        prefix = [start, *forced] if self._start is None else forced
        translator = self.translator
        if search.is_sampling:
            # CTranslate2 seeds its random numbers when a thread starts. A new translator has new threads.
            ctranslate2.set_random_seed(int(torch.randint(2**31 - 1, ())))
            translator = self._load()
        suppressed = [[self.targets[index] for index in word] for word in search.suppressed]

        def hypothesis(tokens: list[str], score: float | None) -> Hypothesis:
            ids = [self._target_ids[token] for token in tokens]
            is_finished = bool(ids) and ids[-1] in search.ends
            if search.forced_end is not None and ids and not is_finished:
                ids[-1] = search.forced_end
            return Hypothesis(ids, score, is_finished)

        def generate_batch(sources: list[Sequence[int]]) -> list[list[Hypothesis]]:
            results = translator.translate_batch(
                [[self.sources[index] for index in source] for source in sources],
                target_prefix=[prefix] * len(sources) if prefix else None,
                end_token=[self.targets[index] for index in search.ends],
                # The length penalty counts the end token only if it is returned.
                return_end_token=True,
                return_scores=return_scores,
                # Turns off CTranslate2's silent truncation.
                max_input_length=0,
                use_vmap=self.use_vmap,
                suppress_sequences=suppressed or None,
                **search.options,
            )
            return [
                list(map(hypothesis, result.hypotheses, result.scores or [None] * len(result.hypotheses)))
                for result in results
            ]

        return generate_batch

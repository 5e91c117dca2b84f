"""Pipelines for translation, summarization and text to text, which transformers 5 dropped.

This file travels with a model: `pipeline("translation", model=folder, trust_remote_code=True)` works without this package.
`metaphrase.inference` registers the same classes for every encoder-decoder.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pipelines.base import Pipeline

# Defaults of transformers 4's pipelines.
DEFAULT_NUM_BEAMS = 4
DEFAULT_MAX_NEW_TOKENS = 256
_OPTIONS_WITHOUT_BEAMS = {"assistant_model", "prompt_lookup_num_tokens", "streamer"}
# The folder of a separate target tokenizer, and its mark in the source tokenizer.
_TARGET_SUBFOLDER = "target_tokenizer"


class Text2TextGenerationPipeline(Pipeline):
    """Pipeline of the task `text2text-generation`, with `generated_text` or `generated_token_ids` as results.

    By default, targets have up to 256 tokens, from beam search with 4 beams.

    Args:
        tokenizer: Tokenizer of the sources, or a pair of tokenizers with the attributes `source` and `target`.
        target_tokenizer: Tokenizer of the targets. By default the one saved beside the source tokenizer, or else `tokenizer`.
        task: Name of the task, whose `task_specific_params` in the model's configuration apply.
        **kwargs: Arguments of transformers' pipelines and of a call: `prefix`, `truncation`, and all options of `generate()`.
    """

    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = False
    _load_tokenizer = True

    return_name = "generated"
    _preprocess_options: tuple[str, ...] = ("truncation", "prefix")

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *args: Any,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        task: str = "",
        **kwargs: Any,
    ):
        if hasattr(tokenizer, "source") and hasattr(tokenizer, "target"):
            tokenizer, target_tokenizer = tokenizer.source, target_tokenizer or tokenizer.target
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given if `model` is not a folder, got None.")
        if target_tokenizer is None:
            folder, target_tokenizer = tokenizer.name_or_path, tokenizer
            # A name on the Hub has no folder, but the source tokenizer has the mark.
            has_folder = os.path.isdir(os.path.join(folder, _TARGET_SUBFOLDER))
            if has_folder or _TARGET_SUBFOLDER in tokenizer.init_kwargs:
                # transformers gives its pipelines neither revision nor token.
                options = getattr(model, "hub_options", {}).get(folder, {})
                target_tokenizer = AutoTokenizer.from_pretrained(folder, subfolder=_TARGET_SUBFOLDER, **options)
        self.target_tokenizer = target_tokenizer
        tasks = getattr(model.config, "task_specific_params", None) or {}
        options = dict(tasks.get(task) or {})
        self.prefix = options.pop("prefix", getattr(model.config, "prefix", None)) or ""
        self.task_options = override_lengths(options)
        super().__init__(model, tokenizer, *args, task=task, **kwargs)
        # Metaphrase models are trained with an end of sequence after each source.
        eos = tokenizer.eos_token_id
        is_metaphrase = model.config.model_type == "metaphrase"
        self._adds_eos = is_metaphrase and eos is not None and eos not in tokenizer("a")["input_ids"]

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        parts = []
        for names in (self._preprocess_options, ("return_tensors", "clean_up_tokenization_spaces")):
            values = {name: options.pop(name, None) for name in names}
            parts.append({name: value for name, value in values.items() if value is not None})
        return parts[0], override_lengths(options), parts[1]

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate the targets of a text, or of a sequence, data set or generator of texts.

        Returns:
            For a text, a list of `num_return_sequences` dictionaries. For a sequence of texts, a dictionary per text, or such a
            list per text for more than one sequence. For a data set or generator, an iterator over a list per text.
        """
        if not isinstance(inputs, Sequence) or isinstance(inputs, str):
            return super().__call__(inputs, *args, **kwargs)
        results = super().__call__(list(inputs), *args, **kwargs) if len(inputs) else []
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def preprocess(self, inputs: str, truncation: bool | str = False, prefix: str | None = None) -> dict[str, Any]:
        """Return the ids and the attention mask of a text, `(1, source)`."""
        text = (self.prefix if prefix is None else prefix) + inputs
        return self._finish_source(self.tokenizer(text, truncation=truncation, return_tensors="pt"), truncation)

    def _finish_source(self, encoded: Mapping[str, Any], truncation: bool | str) -> dict[str, Any]:
        encoded = {name: value for name, value in encoded.items() if name != "token_type_ids"}
        if self._adds_eos:
            ids, max_length = encoded["input_ids"], self.tokenizer.model_max_length
            if truncation not in (False, "do_not_truncate") and ids.shape[1] >= max_length:
                # The tokenizer has left no room for the end.
                ids = ids[:, : max_length - 1]
            encoded["input_ids"] = torch.cat((ids, ids.new_full((1, 1), self.tokenizer.eos_token_id)), dim=1)
            encoded["attention_mask"] = torch.ones_like(encoded["input_ids"])
        limit, num_tokens = getattr(self.model.config, "position_limit", None), encoded["input_ids"].shape[1]
        if limit is not None and num_tokens > limit:
            raise ValueError(
                f"A text must not have more tokens than the model has positions, {limit}, got {num_tokens}. "
                "Set `truncation=True` to cut texts at the tokenizer's `model_max_length`."
            )
        return encoded

    def _forward(self, model_inputs: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
        """Return `output_ids`, `(batch, num_return_sequences, target)`."""
        model_inputs = dict(model_inputs)
        # Multilingual tokenizers give the target language under this name, in a batch once for each text.
        language = model_inputs.pop("forced_bos_token_id", None)
        if language is not None:
            name = "decoder_start_token_id" if self._starts_with_language() else "forced_bos_token_id"
            options = {name: language[0] if isinstance(language, list) else language} | options
        if options.get("generation_config") is None:
            options = self.task_options | options
            # Defaults of the pipeline, where neither the options nor the model have a value.
            saved = self.model.generation_config.to_diff_dict()
            settings = {name for name, value in saved.items() if value is not None} | options.keys()
            if not settings & {"max_length", "max_new_tokens"}:
                options["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
            if "num_beams" not in settings and not settings & _OPTIONS_WITHOUT_BEAMS:
                options["num_beams"] = max(DEFAULT_NUM_BEAMS, options.get("num_return_sequences") or 1)
            if "pad_token_id" not in settings:
                options["pad_token_id"] = self.target_tokenizer.pad_token_id
        # Between steps of training, a model has dropout.
        output = self.model.eval().generate(**model_inputs, **options)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        # (batch * num_return_sequences, target) -> (batch, num_return_sequences, target)
        return {"output_ids": sequences.reshape(len(model_inputs["input_ids"]), -1, sequences.shape[-1])}

    def _starts_with_language(self) -> bool:
        """Return True if the decoder starts with a language code, as in the first mBART."""
        other_ids = (None, *(getattr(self.target_tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")))
        return self.model.generation_config.decoder_start_token_id not in other_ids

    def postprocess(
        self, model_outputs: dict, return_tensors: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> list[dict[str, Any]]:
        rows = model_outputs["output_ids"][0]
        if return_tensors:
            return [{f"{self.return_name}_token_ids": ids} for ids in rows]
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return [{f"{self.return_name}_text": self.target_tokenizer.decode(ids, **options)} for ids in rows]

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save model and tokenizers. The code of a Metaphrase model holds these pipelines."""
        self.model.save_pretrained(save_directory, **kwargs)
        # The source tokenizer itself may be saved again without a target tokenizer.
        source = copy.copy(self.tokenizer)
        source.init_kwargs = {name: value for name, value in source.init_kwargs.items() if name != _TARGET_SUBFOLDER}
        if self.target_tokenizer is not self.tokenizer:
            source.init_kwargs[_TARGET_SUBFOLDER] = _TARGET_SUBFOLDER
            self.target_tokenizer.save_pretrained(os.path.join(save_directory, _TARGET_SUBFOLDER))
        source.save_pretrained(save_directory, **kwargs)


class SummarizationPipeline(Text2TextGenerationPipeline):
    """Pipeline of the task `summarization`, with `summary_text` or `summary_token_ids` as results."""

    return_name = "summary"


class TranslationPipeline(Text2TextGenerationPipeline):
    """Pipeline of the tasks `translation` and `translation_xx_to_yy`, with `translation_text` or `translation_token_ids`.

    `src_lang` and `tgt_lang` are the languages of a multilingual model, as codes of its tokenizer.
    """

    return_name = "translation"
    _preprocess_options = ("truncation", "prefix", "src_lang", "tgt_lang")

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *args: Any, task: str = "", **kwargs: Any):
        if languages := re.fullmatch("translation_(.+?)_to_(.+)", task):
            kwargs = {"src_lang": languages[1], "tgt_lang": languages[2]} | kwargs
        elif "tgt_lang" in kwargs:
            task = f"translation_{kwargs.get('src_lang')}_to_{kwargs['tgt_lang']}"
        super().__init__(model, tokenizer, *args, task=task, **kwargs)

    def preprocess(
        self, inputs: str, truncation: bool | str = False, prefix: str | None = None, **languages: str
    ) -> dict[str, Any]:
        """Return the ids and the attention mask of a text, `(1, source)`, and the id of the target language, if any."""
        has_default = self.model.generation_config.forced_bos_token_id is not None or self._starts_with_language()
        build = getattr(self.tokenizer, "_build_translation_inputs", None)
        if build is None or (not languages and has_default):
            return super().preprocess(inputs, truncation, prefix)
        languages = {"src_lang": None, "tgt_lang": None} | languages
        codes = getattr(self.tokenizer, "lang_code_to_token", None) or self.tokenizer.get_added_vocab()
        for name, code in languages.items():
            # A tokenizer would read another word as a language.
            if code not in {None, *codes}:
                raise ValueError(f"`{name}` must be a language that the tokenizer knows, got {code!r}.")
        text = (prefix or "") + inputs
        encoded = build(text, return_tensors="pt", truncation=truncation, **languages)
        return self._finish_source(encoded, truncation)


def override_lengths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Set the counterpart of a given length to None, since `generate()` prefers new tokens in any setting of the model."""
    options = dict(options)
    for names in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        for name, counterpart in (names, names[::-1]):
            if options.get(name) is not None:
                options.setdefault(counterpart, None)
    return options

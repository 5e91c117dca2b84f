"""Pipelines for translation, summarization and text to text, as in transformers 4, for every encoder-decoder.

transformers 5 has no such pipelines. This file travels with a model, so that `pipeline("translation", model=folder,
trust_remote_code=True)` works without this package.
"""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.pipelines.base import Pipeline, pad_collate_fn
from transformers.tokenization_utils_base import TruncationStrategy

from .compat import translation_inputs
from .pipeline_support import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_MAX_TOKENS_PER_BATCH,
    CustomPipelines,
    batches_by_length,
    evaluating,
    find_target_tokenizer,
    generation_arguments,
    generation_settings,
    has_languages,
    is_independent_of_batch,
    language_id,
    languages_of,
    longest_source,
    override_lengths,
    pad_after_end,
    save_tokenizers,
    task_settings,
)


class EncoderDecoderPipeline(Pipeline):
    """Base class of the pipelines.

    By default, targets have up to 256 tokens, from beam search with 4 beams. A list of texts is decoded in batches of similar
    length, which changes neither the results nor their order.

    Attributes:
        return_name: First word of the keys of the results.
        tokenizer: Tokenizer of the sources.
        target_tokenizer: Tokenizer of the targets, the same object if source and target share a tokenizer.
    """

    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    return_name: str

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *args: Any,
        target_tokenizer: PreTrainedTokenizerBase | str | None = None,
        task: str = "",
        **kwargs: Any,
    ):
        """Set up the pipeline; `pipeline()` calls this method.

        Args:
            model: An encoder-decoder with `generate()`.
            tokenizer: Tokenizer of the sources, or a pair of tokenizers with the attributes `source` and `target`.
            *args: Arguments of transformers' pipelines.
            target_tokenizer: Tokenizer of the targets, or its folder. By default the target tokenizer beside the source
                tokenizer (on the Hub, in the main branch), or else the source tokenizer.
            task: Name of the task, whose settings in the model's configuration apply.
            **kwargs: Arguments of transformers' pipelines and of a call.

        Raises:
            ValueError: If the model is not an encoder-decoder with `generate()`, or a tokenizer is missing.
        """
        if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise ValueError(f"`model` must be an encoder-decoder that generates, got {type(model).__name__}.")
        if hasattr(tokenizer, "source") and hasattr(tokenizer, "target"):
            tokenizer, target_tokenizer = tokenizer.source, target_tokenizer or tokenizer.target
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given if `model` is not a folder, got None.")
        self.target_tokenizer = find_target_tokenizer(tokenizer, target_tokenizer)
        settings, names = task_settings(model.config).get(task, {}), generation_settings()
        self.prefix = settings.pop("prefix", getattr(model.config, "prefix", None)) or ""
        self.task_options = {name: value for name, value in settings.items() if name in names}
        super().__init__(model, tokenizer, *args, task=task, **kwargs)
        # The base class would merge these options into those of a call, where a generation config must replace them.
        options, self._forward_params = override_lengths(self._forward_params), {}
        if "generation_config" not in options:
            options = override_lengths(self.task_options) | options
        self._options = options
        # Metaphrase models are trained with an end of sequence after each source.
        eos, is_metaphrase = self.tokenizer.eos_token_id, self.model.config.model_type == "metaphrase"
        self._adds_eos = is_metaphrase and eos is not None and eos not in self.tokenizer("a")["input_ids"]

    def _sanitize_parameters(
        self,
        return_tensors: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | str | TruncationStrategy | None = None,
        prefix: str | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict, dict, dict]:
        preprocess = _without_none(truncation=truncation, prefix=prefix)
        postprocess = _without_none(
            return_tensors=return_tensors, clean_up_tokenization_spaces=clean_up_tokenization_spaces
        )
        return preprocess, generate_kwargs, postprocess

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate the targets of texts.

        Args:
            inputs: A text, a sequence of texts such as a list or a column of a data set, or a data set or generator of texts.
            *args: Not used; transformers' pipelines warn of them.
            **kwargs: These, and all options of `generate()`.
                `return_tensors`: True to return token ids, not texts.
                `clean_up_tokenization_spaces`: True to remove spaces before punctuation.
                `truncation`: True to cut sources at the tokenizer's `model_max_length`.
                `prefix`: Text before each source, by default the model's prefix for the task.
                `batch_size`, `num_workers`: By default texts are decoded in batches of similar length.
                `src_lang`, `tgt_lang`: Languages of a translation.

        Returns:
            For a text, a list of `num_return_sequences` dictionaries. For a sequence of texts, a dictionary per text, or such a
            list per text for more than one sequence. For a data set or generator, an iterator over a list per text.

        Raises:
            ValueError: If an input is not a text, or an option has a wrong value.
        """
        if not isinstance(inputs, Sequence) or isinstance(inputs, str):
            return super().__call__(inputs, *args, **kwargs)
        texts = list(inputs)
        for text in texts:
            _check_text(text)
        results = self._generate_in_batches(texts, **kwargs)
        if results is None:
            results = super().__call__(texts, *args, **kwargs) if texts else []
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def _generate_in_batches(
        self, texts: list[str], batch_size: int | None = None, num_workers: int | None = None, **kwargs: Any
    ) -> list | None:
        """Return the results of texts in batches of similar length, or None if the caller must set the batches."""
        sizes = (batch_size, num_workers, self._batch_size, self._num_workers)
        if len(texts) < 2 or sizes != (None,) * 4 or self.tokenizer.pad_token_id is None:
            return None
        preprocess, forward, postprocess = self._sanitize_parameters(**kwargs)
        if not is_independent_of_batch(self.model, self._generation_arguments(forward)):
            return None
        sources = [self.preprocess(text, **(self._preprocess_params | preprocess)) for text in texts]
        lengths = [source["input_ids"].shape[1] for source in sources]
        collate = pad_collate_fn(self.tokenizer, None)
        results: list = [None] * len(texts)
        for batch in batches_by_length(lengths, DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH):
            output_ids = self.forward(collate([sources[index] for index in batch]), **forward)["output_ids"]
            for index, ids in zip(batch, output_ids, strict=True):
                results[index] = self.postprocess({"output_ids": ids[None]}, **(self._postprocess_params | postprocess))
        return results

    def preprocess(
        self, inputs: str, truncation: bool | str | TruncationStrategy = False, prefix: str | None = None
    ) -> dict[str, Any]:
        """Return the ids and the attention mask of a text, `(1, source)`."""
        _check_text(inputs)
        text = (self.prefix if prefix is None else prefix) + inputs
        return self._finish_source(self.tokenizer(text, truncation=truncation, return_tensors="pt"), truncation)

    def _finish_source(self, encoded: Any, truncation: Any) -> dict[str, Any]:
        """Add the end of sequence and check the length."""
        encoded = {name: value for name, value in encoded.items() if name != "token_type_ids"}
        max_length = self.tokenizer.model_max_length
        if self._adds_eos:
            is_cut = truncation not in (None, False, TruncationStrategy.DO_NOT_TRUNCATE)
            ids = encoded["input_ids"][:, : max_length - 1 if is_cut else None]
            encoded["input_ids"] = torch.cat([ids, ids.new_full((1, 1), self.tokenizer.eos_token_id)], dim=1)
            encoded["attention_mask"] = torch.ones_like(encoded["input_ids"])
        limit, num_tokens = longest_source(self.model), encoded["input_ids"].shape[1]
        if limit is not None and num_tokens > limit:
            raise ValueError(
                f"A text must not have more tokens than the model has positions, {limit}, got {num_tokens}. "
                f"Set `truncation=True` to cut texts at the tokenizer's `model_max_length`, {max_length}."
            )
        return encoded

    def _generation_arguments(self, options: dict[str, Any]) -> dict[str, Any]:
        return generation_arguments(self.model, self._options, options, self.target_tokenizer.pad_token_id)

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, torch.Tensor]:
        """Return `output_ids`, `(batch, num_return_sequences, target)`."""
        model_inputs = dict(model_inputs)
        arguments = self._generation_arguments(self._pop_language(model_inputs) | generate_kwargs)
        with evaluating([self.model]):
            output = self.model.generate(**model_inputs, **arguments)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        sequences = pad_after_end(sequences, self.model, arguments, self.target_tokenizer.pad_token_id)
        # (batch * num_return_sequences, target) -> (batch, num_return_sequences, target)
        return {"output_ids": sequences.reshape(len(model_inputs["input_ids"]), -1, sequences.shape[-1])}

    def _pop_language(self, model_inputs: dict[str, Any]) -> dict[str, int]:
        """Remove the target language from the inputs, and return it as an option of `generate()`."""
        code = model_inputs.pop("forced_bos_token_id", None)
        if code is None:
            return {}
        # A batch has a copy for each text.
        code = code[0] if isinstance(code, list) else code
        return {"decoder_start_token_id" if self._starts_with_language() else "forced_bos_token_id": code}

    def _starts_with_language(self) -> bool:
        """Return True if the decoder starts with a language code, as in the first mBART."""
        config, tokenizer = self.model.generation_config, self.target_tokenizer
        other_ids = (None, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        return config.decoder_start_token_id not in other_ids

    def postprocess(
        self,
        model_outputs: dict[str, torch.Tensor],
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Return a dictionary for each target of one text, from `output_ids` `(1, num_return_sequences, target)`."""
        rows = model_outputs["output_ids"][0]
        if return_tensors:
            return [{f"{self.return_name}_token_ids": self._remove_padding(ids)} for ids in rows]
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return [{f"{self.return_name}_text": self.target_tokenizer.decode(ids, **options)} for ids in rows]

    def _remove_padding(self, ids: torch.Tensor) -> torch.Tensor:
        pad, eos = self.target_tokenizer.pad_token_id, self.target_tokenizer.eos_token_id
        token_columns = (ids != pad).nonzero().flatten()
        length = 1 if len(token_columns) == 0 else int(token_columns[-1]) + 1
        return ids[: length + (pad == eos)]

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save model, tokenizers and the code of the pipelines, for `pipeline(..., trust_remote_code=True)`."""
        os.makedirs(save_directory, exist_ok=True)
        config = self.model.config
        custom = CustomPipelines.with_all_tasks(getattr(config, "custom_pipelines", None))
        # Configurations of other families are plain dictionaries, which need the exact name of a task.
        languages = {task: custom[task] for task in (self.task, *task_settings(config)) if languages_of(task)}
        config.custom_pipelines = CustomPipelines.with_all_tasks(dict(custom) | languages)
        self.model.save_pretrained(save_directory, **kwargs)
        custom_object_save(self, save_directory)
        save_tokenizers(self.tokenizer, self.target_tokenizer, save_directory, **kwargs)


class Text2TextGenerationPipeline(EncoderDecoderPipeline):
    """Pipeline of the task `text2text-generation`, with `generated_text` and `generated_token_ids` as results."""

    return_name = "generated"


class SummarizationPipeline(EncoderDecoderPipeline):
    """Pipeline of the task `summarization`, with `summary_text` and `summary_token_ids` as results."""

    return_name = "summary"


class TranslationPipeline(EncoderDecoderPipeline):
    """Pipeline of the tasks `translation` and `translation_xx_to_yy`.

    The results are `translation_text` and `translation_token_ids`. The languages of a multilingual model are codes of its
    tokenizer, or the names in its tasks.
    """

    return_name = "translation"

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *args: Any, task: str = "", **kwargs: Any):
        """Set up the pipeline, with `src_lang` and `tgt_lang` for all calls among the arguments.

        Raises:
            ValueError: If `EncoderDecoderPipeline` raises an error, or the model has settings for other languages only.
        """
        if task == "translation":
            task = _find_translation_task(model, tokenizer, kwargs.get("src_lang"), kwargs.get("tgt_lang"))
        super().__init__(model, tokenizer, *args, task=task, **kwargs)

    def _sanitize_parameters(
        self, src_lang: str | None = None, tgt_lang: str | None = None, **kwargs: Any
    ) -> tuple[dict, dict, dict]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        # The languages in the name of the task are defaults, which only `__init__` sets.
        if src_lang is None and tgt_lang is None and not hasattr(self, "_preprocess_params"):
            src_lang, tgt_lang = languages_of(self.task) or (None, None)
        return preprocess | _without_none(src_lang=src_lang, tgt_lang=tgt_lang), forward, postprocess

    def preprocess(
        self,
        inputs: str,
        truncation: bool | str | TruncationStrategy = False,
        prefix: str | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> dict[str, Any]:
        """Return the ids and the attention mask of a text, `(1, source)`, and the id of the target language, if any."""
        _check_text(inputs)
        has_default = self.model.generation_config.forced_bos_token_id is not None or self._starts_with_language()
        if not has_languages(self.tokenizer) or (src_lang is tgt_lang is None and has_default):
            return super().preprocess(inputs, truncation, prefix)
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        for name, code in languages.items():
            language_id(self.tokenizer, name, code)
        text = (prefix or "") + inputs
        encoded = translation_inputs(self.tokenizer, text, return_tensors="pt", truncation=truncation, **languages)
        return self._finish_source(encoded, truncation)


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"`inputs` must be a text or a list of texts, got {repr(text)[:60]} ({type(text).__name__}).")


def _find_translation_task(model: PreTrainedModel, tokenizer: Any, src_lang: str | None, tgt_lang: str | None) -> str:
    """Return the task for which the model's configuration has settings, or `translation` without such settings."""
    tasks = [task for task in task_settings(model.config) if languages_of(task)]
    task = f"translation_{src_lang}_to_{tgt_lang}"
    if task in tasks:
        return task
    if not tasks or has_languages(getattr(tokenizer, "source", tokenizer)):
        return "translation"
    if src_lang is None and tgt_lang is None:
        warnings.warn(f"The task is translation, without languages: {tasks[0]} is used.", stacklevel=4)
        return tasks[0]
    raise ValueError(
        f"`src_lang` and `tgt_lang` must be those of a task of the model, one of {', '.join(tasks)}, "
        f"got {src_lang!r} and {tgt_lang!r}."
    )

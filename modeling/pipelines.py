"""The assistant of a pipeline: a smaller model that drafts, and its tokenizer.

The way of texts through an encoder-decoder, as transformers 4's pipelines for it had it: texts in, dictionaries out.

Pipelines: translation, summarization and text to text as transformers 4 had them, for every encoder-decoder.

transformers 5 has none of these. The file travels with a model, so that `pipeline("translation", model=folder,
trust_remote_code=True)` works without this package.
"""

import enum
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.pipelines.base import Pipeline, load_assistant_model, pad_collate_fn
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import logging

from .compat import translation_inputs
from .pipeline_support import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_MAX_TOKENS_PER_BATCH,
    batches_by_length,
    check_length,
    evaluating,
    find_target_tokenizer,
    generation_arguments,
    generation_settings,
    has_languages,
    is_of_each_text,
    lacks_end_of_sequence,
    language_id,
    length_limits,
    pad_behind_ends,
    save_tokenizers,
    with_lengths,
)
from .pipeline_tasks import CustomPipelines, languages_of, task_settings, translation_tasks


def find_assistant(
    model: PreTrainedModel,
    given: PreTrainedModel | str | os.PathLike | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[PreTrainedModel | None, PreTrainedTokenizerBase | None]:
    """What was given, or what lies there; the tokenizer only where it is not that of the model.

    Raises:
        ValueError: If the vocabularies differ, and there is no tokenizer.
    """
    if isinstance(given, str | os.PathLike):
        given = os.fspath(given)
        config, _ = PreTrainedConfig.get_config_dict(given)
        # By the name of a class transformers finds none but its own; that of the model is here.
        if config.get("architectures") == [type(model).__name__]:
            tokenizer = AutoTokenizer.from_pretrained(given) if tokenizer is None else tokenizer
            given = type(model).from_pretrained(given).to(device=model.device, dtype=model.dtype)
    return load_assistant_model(model, given, tokenizer)


class ReturnType(enum.Enum):
    """What `return_type` asks for."""

    TENSORS = 0
    TEXT = 1


class EncoderDecoderPipeline(Pipeline):
    """What the tasks have in common.

    Where neither the call nor the model decides, targets have up to 256 tokens and are found with 4 beams. A list of texts for
    which nobody gave a `batch_size` is decoded in batches of like length, which changes neither results nor their order.

    Attributes:
        return_name: The first part of the results' names.
        tokenizer: Of the sources.
        target_tokenizer: Of the targets; the same object where one tokenizer serves both sides.
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
        assistant_model: PreTrainedModel | str | os.PathLike | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        task: str = "",
        **kwargs: Any,
    ):
        """Joins the parts; `pipeline()` calls this.

        Args:
            model: An encoder-decoder that generates.
            tokenizer: Of the sources, or a pair of tokenizers with the attributes `source` and `target`.
            *args: As for transformers' pipelines.
            target_tokenizer: Of the targets, or where it lies. By default the one that was saved with the sources' tokenizer, on
                the Hub that of the main branch, and the sources' tokenizer itself if there is none.
            assistant_model: As for `generate()`, or where it lies.
            assistant_tokenizer: As for `generate()`.
            task: The name of the task; the model's own settings for it apply.
            **kwargs: As for transformers' pipelines and for a call.

        Raises:
            ValueError: If the model is no encoder-decoder, there is no tokenizer, or the one of the targets is missing.
        """
        if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise ValueError(f"`model` must be an encoder-decoder that generates, got {type(model).__name__}.")
        if hasattr(tokenizer, "source") and hasattr(tokenizer, "target"):
            tokenizer, target_tokenizer = tokenizer.source, target_tokenizer or tokenizer.target
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given, since the model is not the name of a folder, got None.")
        self.target_tokenizer = find_target_tokenizer(tokenizer, target_tokenizer)
        self.assistant_model, self.assistant_tokenizer = find_assistant(model, assistant_model, assistant_tokenizer)
        settings = task_settings(model.config, task)
        self.prefix = settings.pop("prefix", getattr(model.config, "prefix", None)) or ""
        known = generation_settings()
        self.task_options = {name: value for name, value in settings.items() if name in known}
        super().__init__(model, tokenizer, *args, task=task, **kwargs)
        # Not merged into those of the call, which may bring a generation config in their place.
        own, self._forward_params = with_lengths(self._forward_params), {}
        # A generation config of the pipeline stands in place of what the task says.
        self._own_options = own if "generation_config" in own else with_lengths(self.task_options) | own
        self._lacks_eos = lacks_end_of_sequence(self.model, self.tokenizer)

    def _sanitize_parameters(
        self,
        return_tensors: bool | None = None,
        return_text: bool | None = None,
        return_type: ReturnType | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        truncation: bool | str | TruncationStrategy | None = None,
        stop_sequence: str | None = None,
        prefix: str | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict, dict, dict]:
        preprocess = {"truncation": truncation, "prefix": prefix}
        if return_type is not None:
            return_tensors, return_text = return_type == ReturnType.TENSORS, return_type == ReturnType.TEXT
        postprocess = {
            "return_tensors": return_tensors,
            "return_text": return_text,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }
        preprocess, postprocess = (
            {name: value for name, value in params.items() if value is not None} for params in (preprocess, postprocess)
        )
        merged = getattr(self, "_postprocess_params", {}) | postprocess
        if merged.get("return_text") is False and not merged.get("return_tensors"):
            raise ValueError("`return_text` must be True where `return_tensors` is not, got False.")
        if stop_sequence is not None:
            generate_kwargs["eos_token_id"] = self._stop_id(stop_sequence)
        if self.assistant_model is not None:
            generate_kwargs["assistant_model"] = self.assistant_model
        if self.assistant_tokenizer is not None:
            generate_kwargs |= {"tokenizer": self.target_tokenizer, "assistant_tokenizer": self.assistant_tokenizer}
        return preprocess, generate_kwargs, postprocess

    def _stop_id(self, stop_sequence: str) -> int:
        ids = self.target_tokenizer.encode(stop_sequence, add_special_tokens=False)
        if not ids:
            raise ValueError(f"`stop_sequence` must have at least one token, got {stop_sequence!r}.")
        if len(ids) > 1:
            warnings.warn(
                f"`stop_sequence` {stop_sequence!r} has {len(ids)} tokens: a target ends with the first of them.",
                stacklevel=2,
            )
        return ids[0]

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Generates the targets of texts.

        Args:
            inputs: A text, a list of texts or any other sequence of them, such as a column of a data set; or a data set or
                generator of texts, which is read as results are asked for.
            *args: As for transformers' pipelines, which warn of them.
            **kwargs: `return_text` [unless `return_tensors`] and `return_tensors` [False]: whether results hold texts and token
                ids; `clean_up_tokenization_spaces` [False]; `truncation` [False]: whether sources are cut at the tokenizer's
                `model_max_length`; `prefix`: stands before every source, by default the model's own for the task;
                `stop_sequence`: its first token ends a target; `batch_size`, `num_workers`; for a translation `src_lang` and
                `tgt_lang`; and all of `generate()`.

        Returns:
            For a text a list of `num_return_sequences` dictionaries. For a list of texts a dictionary each, or such a list each
            if more than one sequence is asked for. For others an iterator over a list each.

        Raises:
            ValueError: If an input is no text, or an argument does not fit.
        """
        if not isinstance(inputs, Sequence) or isinstance(inputs, str):
            return super().__call__(inputs, *args, **kwargs)
        inputs = list(inputs)
        for text in inputs:
            check_text(text)
        results = self._in_batches(inputs, **kwargs) if self._may_batch(inputs, kwargs) else None
        if results is None:
            results = super().__call__(inputs, *args, **kwargs) if inputs else []
        return [result[0] for result in results] if all(len(result) == 1 for result in results) else results

    def _may_batch(self, texts: list[str], kwargs: dict[str, Any]) -> bool:
        sizes = (kwargs.get("batch_size"), kwargs.get("num_workers"), self._batch_size, self._num_workers)
        return len(texts) > 1 and sizes == (None,) * 4 and self.tokenizer.pad_token_id is not None

    def _in_batches(
        self, texts: list[str], batch_size: None = None, num_workers: None = None, **kwargs: Any
    ) -> list | None:
        """The results of a list in batches of like length; `None` where batches might change them."""
        preprocess, forward, postprocess = self._sanitize_parameters(**kwargs)
        if not is_of_each_text(self.model, self._generation_arguments(forward)):
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

    def check_inputs(self, input_length: int, min_length: int, max_length: int) -> bool:
        """Warns of lengths that do not look right for the task, in tokens; here there are none."""
        return True

    def preprocess(
        self, inputs: str, truncation: bool | str | TruncationStrategy = False, prefix: str | None = None
    ) -> dict[str, Any]:
        """The ids and the mask `(1, source)` of a text."""
        check_text(inputs)
        text = (self.prefix if prefix is None else prefix) + inputs
        return self._with_eos(self.tokenizer(text, truncation=truncation, return_tensors="pt"), truncation)

    def _with_eos(self, encoded: Any, truncation: Any) -> dict[str, Any]:
        """Without what `generate()` does not know, and with an end of sequence, where training has put it behind the text."""
        encoded = {name: value for name, value in encoded.items() if name != "token_type_ids"}
        if self._lacks_eos:
            cuts = truncation not in (None, False, TruncationStrategy.DO_NOT_TRUNCATE)
            room = self.tokenizer.model_max_length - 1 if cuts else None
            ids = encoded["input_ids"][:, :room]
            encoded["input_ids"] = torch.cat([ids, ids.new_full((1, 1), self.tokenizer.eos_token_id)], dim=1)
            encoded["attention_mask"] = torch.ones_like(encoded["input_ids"])
        check_length(self.model, self.tokenizer, encoded["input_ids"].shape[1])
        return encoded

    def _generation_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        return generation_arguments(self.model, self._own_options, given, self.target_tokenizer.pad_token_id)

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, torch.Tensor]:
        """`output_ids` `(batch, num_return_sequences, target)`."""
        model_inputs = dict(model_inputs)
        arguments = self._generation_arguments(self._language_options(model_inputs) | generate_kwargs)
        input_ids, mask = model_inputs["input_ids"], model_inputs.get("attention_mask")
        lengths = [input_ids.shape[1]] if mask is None else sorted(set(mask.sum(dim=1).tolist()))
        least, most = length_limits(self.model, arguments)
        for length in lengths if most is not None else ():
            self.check_inputs(length, least, most)
        with evaluating([self.model]):
            output = self.model.generate(**model_inputs, **arguments)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        sequences = pad_behind_ends(sequences, self.model, arguments, self.target_tokenizer.pad_token_id)
        # (batch * num_return_sequences, target) -> (batch, num_return_sequences, target)
        return {"output_ids": sequences.reshape(len(input_ids), -1, sequences.shape[-1])}

    def _language_options(self, model_inputs: dict[str, Any]) -> dict[str, int]:
        """Takes from the inputs of a batch what is an option: the code of the language to write."""
        code = model_inputs.pop("forced_bos_token_id", None)
        if code is None:
            return {}
        code = code[0] if isinstance(code, list) else code
        return {"decoder_start_token_id" if self._starts_with_language() else "forced_bos_token_id": code}

    def _starts_with_language(self) -> bool:
        """Whether the decoder starts with the code of a language, as that of the first mBART."""
        config, tokenizer = self.model.generation_config, self.target_tokenizer
        plain = (None, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        return config.decoder_start_token_id not in plain

    def postprocess(
        self,
        model_outputs: dict[str, torch.Tensor],
        return_tensors: bool = False,
        return_text: bool | None = None,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """The results of one text, `output_ids` `(1, num_return_sequences, target)`."""
        records = []
        for ids in model_outputs["output_ids"][0]:
            record = {}
            if not return_tensors if return_text is None else return_text:
                record[f"{self.return_name}_text"] = self.target_tokenizer.decode(
                    ids, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
                )
            if return_tensors:
                record[f"{self.return_name}_token_ids"] = self._without_padding(ids)
            records.append(record)
        return records

    def _without_padding(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids up to the end of sequence, so that they are the same in every batch."""
        pad, eos = self.target_tokenizer.pad_token_id, self.target_tokenizer.eos_token_id
        kept = (ids != pad).nonzero().flatten()
        length = 1 if len(kept) == 0 else int(kept[-1]) + 1
        return ids[: length + (pad == eos)]

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Saves the model, its tokenizers and the code of the pipelines, for `pipeline(..., trust_remote_code=True)`."""
        os.makedirs(save_directory, exist_ok=True)
        config = self.model.config
        custom = CustomPipelines.with_all_tasks(getattr(config, "custom_pipelines", None))
        # Other families' configurations do not find translation under the names of its languages.
        languages = {task: custom[task] for task in (self.task, *translation_tasks(config)) if languages_of(task)}
        config.custom_pipelines = CustomPipelines.with_all_tasks(dict(custom) | languages)
        self.model.save_pretrained(save_directory, **kwargs)
        custom_object_save(self, save_directory)
        save_tokenizers(self.tokenizer, self.target_tokenizer, save_directory, **kwargs)


def check_text(text: Any) -> None:
    """Makes sure that an input is a text.

    Raises:
        ValueError: If it is anything else.
    """
    if not isinstance(text, str):
        raise ValueError(f"`inputs` must be a text or a list of texts, got {repr(text)[:60]} ({type(text).__name__}).")


logger = logging.get_logger(__name__)


class Text2TextGenerationPipeline(EncoderDecoderPipeline):
    """Any text for any text: the task `text2text-generation`, with results named `generated_text` and `generated_token_ids`."""

    return_name = "generated"


class SummarizationPipeline(EncoderDecoderPipeline):
    """Summaries of texts: the task `summarization`, with results named `summary_text` and `summary_token_ids`."""

    return_name = "summary"

    def check_inputs(self, input_length: int, min_length: int, max_length: int) -> bool:
        """Warns if a summary may not have a length, or may be longer than its text."""
        if max_length < min_length:
            logger.warning("`min_length` should not be above `max_length`, got %d and %d.", min_length, max_length)
        if input_length < max_length:
            logger.warning(
                "`max_length` of %d is more than the %d tokens of the text, and a summary is shorter: consider max_length=%d.",
                *(max_length, input_length, max(1, input_length // 2)),
            )
        return True


class TranslationPipeline(EncoderDecoderPipeline):
    """Translations of texts: the tasks `translation` and `translation_xx_to_yy`, with results named `translation_text` and
    `translation_token_ids`.

    Languages matter to models of many: they are codes that the tokenizer knows, or those of one of the model's own tasks.
    """

    return_name = "translation"

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *args: Any, task: str = "", **kwargs: Any):
        """As the parent's, with `src_lang` and `tgt_lang` for every call.

        Raises:
            ValueError: As the parent's, or if the model has settings for some languages, but not for these.
        """
        if task == "translation":
            task = _own_translation_task(model, tokenizer, kwargs.get("src_lang"), kwargs.get("tgt_lang"))
        super().__init__(model, tokenizer, *args, task=task, **kwargs)

    def _sanitize_parameters(
        self, src_lang: str | None = None, tgt_lang: str | None = None, **kwargs: Any
    ) -> tuple[dict, dict, dict]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        # Only when the pipeline is made: languages that it was given stand above those in the name of its task.
        if src_lang is None and tgt_lang is None and not hasattr(self, "_preprocess_params"):
            languages = dict(zip(languages, languages_of(self.task) or (None, None), strict=True))
        preprocess |= {name: code for name, code in languages.items() if code is not None}
        return preprocess, forward, postprocess

    def check_inputs(self, input_length: int, min_length: int, max_length: int) -> bool:
        """Warns if a translation as long as its text would be cut off."""
        if input_length > 0.9 * max_length:
            logger.warning(
                "The text has %d tokens, and its translation may have %d: consider a larger `max_length`.",
                *(input_length, max_length),
            )
        return True

    def preprocess(
        self,
        inputs: str,
        truncation: bool | str | TruncationStrategy = False,
        prefix: str | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> dict[str, Any]:
        """The ids and the mask `(1, source)` of a text, and the code of the language to write, where the tokenizer has codes."""
        check_text(inputs)
        tokenizer = self.tokenizer
        has_own_target = self.model.generation_config.forced_bos_token_id is not None or self._starts_with_language()
        if not has_languages(tokenizer) or (src_lang is tgt_lang is None and has_own_target):
            return super().preprocess(inputs, truncation, prefix)
        for name, code in (("src_lang", src_lang), ("tgt_lang", tgt_lang)):
            language_id(tokenizer, name, code)
        encoded = translation_inputs(
            tokenizer,
            (prefix or "") + inputs,
            return_tensors="pt",
            truncation=truncation,
            src_lang=src_lang,
            tgt_lang=tgt_lang,
        )
        return self._with_eos(encoded, truncation)


def _own_translation_task(model: PreTrainedModel, tokenizer: Any, src_lang: str | None, tgt_lang: str | None) -> str:
    """The task that the model's own settings know translation by; translation if they know of none.

    Raises:
        ValueError: If the languages are none of them, and the tokenizer has none either.
    """
    known = list(translation_tasks(model.config))
    wanted = f"translation_{src_lang}_to_{tgt_lang}"
    if wanted in known:
        return wanted
    if not known or has_languages(getattr(tokenizer, "source", tokenizer)):
        return "translation"
    if src_lang is None and tgt_lang is None:
        warnings.warn(f"The task is translation, without languages: it is taken for {known[0]}.", stacklevel=4)
        return known[0]
    raise ValueError(
        f"`src_lang` and `tgt_lang` must be those of a task of the model, one of {', '.join(known)}, "
        f"got {src_lang!r} and {tgt_lang!r}."
    )

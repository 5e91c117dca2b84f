"""Pipelines: translation, summarization and text to text as transformers 4 had them, for every encoder-decoder.

transformers 5 has none of these. The file travels with a model, so that `pipeline("translation", model=folder,
trust_remote_code=True)` works without this package.
"""

import warnings
from typing import Any

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import logging

from .encoder_decoder_pipeline import EncoderDecoderPipeline, check_text
from .pipeline_tasks import languages_of, translation_tasks
from .pipeline_tokenizers import has_languages, language_id

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
        encoded = tokenizer._build_translation_inputs(
            (prefix or "") + inputs, return_tensors="pt", truncation=truncation, src_lang=src_lang, tgt_lang=tgt_lang
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

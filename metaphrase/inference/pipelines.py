"""Register translation, summarization and text to text with transformers' `pipeline()`, for every encoder-decoder."""

import functools
import re
from typing import Any

import transformers.pipelines
from transformers import AutoModelForSeq2SeqLM
from transformers.pipelines import PIPELINE_REGISTRY

from metaphrase.modeling import MetaphraseConfig
from metaphrase.modeling.pipelines import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline

_TASKS = {
    "translation": TranslationPipeline,
    "summarization": SummarizationPipeline,
    "text2text-generation": Text2TextGenerationPipeline,
}


def _check_task(check: Any, task: str) -> tuple[str, dict, Any]:
    """Extend the registry's `check_task` by translation_xx_to_yy. Its languages become options of a multilingual model."""
    match = re.fullmatch("translation_(.+?)_to_(.+)", task)
    name, implementation, options = check("translation" if match else task)
    return name, implementation, match.groups() if match else options


for _task, _class in _TASKS.items():
    PIPELINE_REGISTRY.supported_tasks.pop(_task, None)
    PIPELINE_REGISTRY.register_pipeline(_task, _class, pt_model=AutoModelForSeq2SeqLM, type="text")
    # Without a default model, `pipeline()` asks for one.
    PIPELINE_REGISTRY.supported_tasks[_task]["default"] = {}
    # transformers refuses a removed task before it looks for a registered one.
    getattr(transformers.pipelines, "REMOVED_TASKS", {}).pop(_task, None)
PIPELINE_REGISTRY.check_task = functools.partial(_check_task, PIPELINE_REGISTRY.check_task)
MetaphraseConfig.has_registered_pipelines = True

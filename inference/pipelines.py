"""Register translation, summarization and text to text with transformers' `pipeline()`, on import."""

import functools
from typing import Any

import transformers.pipelines
from transformers import AutoModelForSeq2SeqLM
from transformers.pipelines import PIPELINE_REGISTRY

from metaphrase.modeling import pipelines
from metaphrase.modeling.pipeline_support import PIPELINE_CLASSES, CustomPipelines, general_task, languages_of
from metaphrase.modeling.pipelines import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline

__all__ = ["SummarizationPipeline", "Text2TextGenerationPipeline", "TranslationPipeline", "register_pipelines"]


def register_pipelines() -> None:
    """Register the tasks for every encoder-decoder. A second call changes nothing."""
    for task, name in PIPELINE_CLASSES.items():
        if task in CustomPipelines.registered:
            continue
        PIPELINE_REGISTRY.supported_tasks.pop(task, None)
        PIPELINE_REGISTRY.register_pipeline(task, getattr(pipelines, name), pt_model=AutoModelForSeq2SeqLM, type="text")
        # Without a default model, `pipeline()` asks for one.
        PIPELINE_REGISTRY.supported_tasks[task]["default"] = {}
        # transformers refuses a removed task before it looks for a registered one.
        getattr(transformers.pipelines, "REMOVED_TASKS", {}).pop(task, None)
    if not CustomPipelines.registered:
        PIPELINE_REGISTRY.check_task = functools.partial(_check_task, PIPELINE_REGISTRY.check_task)
    CustomPipelines.registered.update(PIPELINE_CLASSES)


def _check_task(check: Any, task: str) -> tuple[str, dict, Any]:
    """Extend the registry's `check_task` by translation_xx_to_yy, whose languages become options.

    Raises:
        KeyError: If the task is unknown.
    """
    if task.startswith("translation_") and languages_of(task) is None:
        raise KeyError(f"`task` must have the form translation_xx_to_yy to name languages, got {task!r}.")
    name, implementation, options = check(general_task(task))
    return name, implementation, languages_of(task) or options


register_pipelines()

"""Tasks of the pipelines: their names, their settings, and the code that a saved model names for them."""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

# Classes of pipelines.py.
PIPELINE_CLASSES = {
    "translation": "TranslationPipeline",
    "summarization": "SummarizationPipeline",
    "text2text-generation": "Text2TextGenerationPipeline",
}
_TRANSLATION = re.compile(r"translation_(.+?)_to_(.+)")


def languages_of(task: str) -> tuple[str, str] | None:
    """Return source and target language of a task such as translation_en_to_de, or None for other tasks."""
    match = _TRANSLATION.fullmatch(task)
    return (match[1], match[2]) if match else None


def general_task(task: str) -> str:
    """Return the task without its languages, such as translation for translation_en_to_de."""
    return task if languages_of(task) is None else "translation"


class CustomPipelines(dict):
    """`custom_pipelines` of a configuration: the code of each task, for `pipeline()`.

    The dictionary contains translation_xx_to_yy, too. It does not contain tasks in `registered`, so that `pipeline()` takes the
    registered class and needs no `trust_remote_code`.

    Attributes:
        registered: Tasks that `import metaphrase.inference` registers.
    """

    registered: ClassVar[set[str]] = set()

    @classmethod
    def with_all_tasks(cls, entries: Mapping[str, Any] | None = None) -> "CustomPipelines":
        """Return the entries of all tasks, with the entries of a folder added or put in their place."""
        return cls({task: _entry(task) for task in PIPELINE_CLASSES} | dict(entries or {}))

    def __contains__(self, task: object) -> bool:
        name = general_task(task) if isinstance(task, str) else task
        return super().__contains__(name) and not (
            name in self.registered and self[name]["impl"] == _entry(name)["impl"]
        )

    def __getitem__(self, task: str) -> dict[str, Any]:
        # transformers writes classes into the entry, which cannot be saved.
        return copy.deepcopy(super().__getitem__(general_task(task)))


def _entry(task: str) -> dict[str, Any]:
    return {"impl": f"pipelines.{PIPELINE_CLASSES[task]}", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}


def task_settings(config: Any, task: str) -> dict[str, Any]:
    """Return the settings of a task in a configuration such as T5's: its `prefix` and options of generation."""
    return dict((getattr(config, "task_specific_params", None) or {}).get(task) or {})


def translation_tasks(config: Any) -> Iterator[str]:
    """Return the tasks translation_xx_to_yy for which a configuration has settings."""
    return (task for task in getattr(config, "task_specific_params", None) or {} if languages_of(task) is not None)

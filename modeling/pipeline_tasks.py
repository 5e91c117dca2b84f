"""The tasks of the pipelines: their names, and how a saved model says which code runs them."""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

# Task to class, all of which stand in pipelines.py.
PIPELINE_CLASSES = {
    "translation": "TranslationPipeline",
    "summarization": "SummarizationPipeline",
    "text2text-generation": "Text2TextGenerationPipeline",
}
_TRANSLATION = re.compile(r"translation_(.+?)_to_(.+)")


def languages_of(task: str) -> tuple[str, str] | None:
    """Source and target language of a task such as translation_en_to_de; `None` for all others."""
    found = _TRANSLATION.fullmatch(task)
    return (found[1], found[2]) if found else None


def general_task(task: str) -> str:
    """The task without its languages: translation for translation_en_to_de, and every other task as it is."""
    return task if languages_of(task) is None else "translation"


class CustomPipelines(dict):
    """`custom_pipelines` of a configuration, in which `pipeline()` looks for the code of a task beside the weights.

    It also answers to translation_xx_to_yy, and it does not answer to tasks that this process knows without that code: for these
    `pipeline()` takes the registered class, and needs no `trust_remote_code`.

    Attributes:
        registered: The tasks that are registered in this process, by `import metaphrase.inference`.
    """

    registered: ClassVar[set[str]] = set()

    @classmethod
    def with_all_tasks(cls, others: Mapping[str, Any] | None = None) -> "CustomPipelines":
        """The entries of every task, as transformers writes them, and those that a folder has besides or instead."""
        return cls({task: _entry(task) for task in PIPELINE_CLASSES} | dict(others or {}))

    def __contains__(self, task: object) -> bool:
        name = general_task(task) if isinstance(task, str) else task
        return super().__contains__(name) and not (
            name in self.registered and self[name]["impl"] == _entry(name)["impl"]
        )

    def __getitem__(self, task: str) -> dict[str, Any]:
        # transformers puts classes in place of their names, which could not be saved.
        return copy.deepcopy(super().__getitem__(general_task(task)))


def _entry(task: str) -> dict[str, Any]:
    return {"impl": f"pipelines.{PIPELINE_CLASSES[task]}", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}


def task_settings(config: Any, task: str) -> dict[str, Any]:
    """What a configuration says of a task: its `prefix` and options of generation, as T5's and BART's have them."""
    return dict((getattr(config, "task_specific_params", None) or {}).get(task) or {})


def translation_tasks(config: Any) -> Iterator[str]:
    """The tasks translation_xx_to_yy of which a configuration has settings."""
    return (task for task in getattr(config, "task_specific_params", None) or {} if languages_of(task) is not None)

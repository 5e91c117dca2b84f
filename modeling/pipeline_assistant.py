"""The assistant of a pipeline: a smaller model that drafts, and its tokenizer."""

import os

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pipelines.base import load_assistant_model


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

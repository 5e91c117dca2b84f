"""The tokenizers of a pipeline: that of the targets beside that of the sources, ends of sequence, and codes of languages."""

import copy
import os
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

# Where a model with two vocabularies keeps the tokenizer of its targets, and the mark of that in the one of its sources.
TARGET_SUBFOLDER = "target_tokenizer"


def find_target_tokenizer(
    source: PreTrainedTokenizerBase, given: PreTrainedTokenizerBase | str | os.PathLike | None
) -> PreTrainedTokenizerBase:
    """The tokenizer of the targets: what was given, what was saved with that of the sources, or this itself.

    Raises:
        ValueError: If a separate tokenizer belongs to it, but is not there.
    """
    if given is not None:
        return AutoTokenizer.from_pretrained(given) if isinstance(given, str | os.PathLike) else given
    place = source.name_or_path
    # On the Hub there is no folder to look into: the mark tells that there is another tokenizer.
    is_apart = TARGET_SUBFOLDER in source.init_kwargs
    if not is_apart and not (place and os.path.isdir(os.path.join(place, TARGET_SUBFOLDER))):
        return source
    try:
        return AutoTokenizer.from_pretrained(place, subfolder=TARGET_SUBFOLDER)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`target_tokenizer` must be given where the tokenizer of the targets is not in `{TARGET_SUBFOLDER}/` beside that of "
            f"the sources, got None, and there is none in {place!r}."
        ) from error


def save_tokenizers(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, folder: str | os.PathLike, **kwargs: Any
) -> None:
    """Saves the tokenizer of the sources, and below it a separate one of the targets."""
    # A copy carries the mark: the tokenizer by itself must not ask for another.
    source_copy = copy.copy(source)
    source_copy.init_kwargs = {name: value for name, value in source.init_kwargs.items() if name != TARGET_SUBFOLDER}
    if target is not source:
        source_copy.init_kwargs[TARGET_SUBFOLDER] = TARGET_SUBFOLDER
        target.save_pretrained(os.path.join(folder, TARGET_SUBFOLDER))
    source_copy.save_pretrained(folder, **kwargs)


def lacks_end_of_sequence(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer leaves out the end of sequence, which Metaphrase then puts behind every source itself."""
    is_ours = model.config.model_type == "metaphrase" and tokenizer.eos_token_id is not None
    return is_ours and tokenizer.eos_token_id not in tokenizer("a")["input_ids"]


def has_languages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer marks sources with their language and knows the code of the one to write."""
    return hasattr(tokenizer, "_build_translation_inputs")


def language_id(tokenizer: PreTrainedTokenizerBase, field: str, code: str | None) -> int:
    """The id of the token that marks a language.

    Args:
        tokenizer: Of many languages.
        field: How the user calls the code.
        code: Of the language, as the tokenizer's class has it.

    Raises:
        ValueError: If the code is missing or unknown, for which the tokenizer would write its unknown token.
    """
    name = type(tokenizer).__name__
    if code is None:
        raise ValueError(f"`{field}` must be given for a {name}, which has many languages, got None.")
    marked = getattr(tokenizer, "lang_code_to_token", None)
    if marked is not None:
        # M2M100's, which fails for all but these.
        token = marked.get(code)
    else:
        # A piece of a word may look like a code: it must be one of the tokens that stand outside texts.
        known = {
            *tokenizer.all_special_tokens,
            *tokenizer.get_added_vocab(),
            *getattr(tokenizer, "lang_code_to_id", {}),
        }
        # Some write their codes with underscores around them.
        token = next((each for each in (code, f"__{code}__") if each in known), None)
    index = None if token is None else tokenizer.convert_tokens_to_ids(token)
    if index is None or index == tokenizer.unk_token_id:
        raise ValueError(f"`{field}` must be a language that the {name} knows, got {code!r}.")
    return index

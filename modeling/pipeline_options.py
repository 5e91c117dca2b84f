"""Options of generation in a pipeline: who decides each of them, and which are of all texts of a batch at once."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

# What transformers 4 generated with where nobody had decided.
DEFAULT_NUM_BEAMS = 4
DEFAULT_MAX_NEW_TOKENS = 256
# These do not go with beams.
_WITHOUT_BEAMS = {"assistant_model", "prompt_lookup_num_tokens", "streamer"}
# Settings of generation by which a text's result depends on what stands beside it, or on what was drawn before it.
_OF_A_BATCH = {"do_sample", "max_time", "prompt_lookup_num_tokens"}
# These look at a source with its padding; with such a value they do nothing.
_OF_PADDING = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}


def generation_settings() -> set[str]:
    """The names of all settings that a `GenerationConfig` has."""
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def generation_arguments(
    model: PreTrainedModel, own: Mapping[str, Any], given: Mapping[str, Any], pad_token_id: int | None
) -> dict[str, Any]:
    """What `generate()` is called with.

    The call decides first, then the pipeline, the settings of the task, the model's generation config, and at last the
    defaults. A `generation_config` of the call stands in place of all but the call's other arguments.

    Args:
        model: Its generation config is read.
        own: The options of the pipeline and of its task.
        given: The options of the call.
        pad_token_id: The tokenizer's, for a model that knows none.
    """
    given = with_lengths(given)
    config = given.pop("generation_config", None)
    if config is None:
        given = with_lengths(own) | given
        config = given.pop("generation_config", None)
    if config is not None:
        # In a copy: transformers wants either a config or single settings.
        config = copy.deepcopy(config)
        rest = config.update(**given)
        prompt = given.get("decoder_input_ids")
        _fix_lengths(config, model.generation_config, 1 if prompt is None else prompt.shape[1])
        return {"generation_config": config, **rest}
    decided = {name for name, value in model.generation_config.to_diff_dict().items() if value is not None} | set(given)
    defaults: dict[str, Any] = {}
    if not decided & {"max_length", "max_new_tokens"}:
        defaults["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
    if "num_beams" not in decided and not decided & _WITHOUT_BEAMS:
        defaults["num_beams"] = max(DEFAULT_NUM_BEAMS, given.get("num_return_sequences") or 1)
    if "pad_token_id" not in decided and pad_token_id is not None:
        defaults["pad_token_id"] = pad_token_id
    return defaults | given


def with_lengths(given: Mapping[str, Any]) -> dict[str, Any]:
    """A length that was given takes the place of the model's own of the other kind.

    Of the two kinds `generate()` prefers the new tokens, whoever has given them, and warns in every batch where it finds both.
    """
    given = dict(given)
    for kinds in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        for name, other in (kinds, kinds[::-1]):
            if given.get(name) is not None:
                given.setdefault(other, None)
    return given


def _fix_lengths(config: GenerationConfig, own: GenerationConfig, prompt_length: int) -> None:
    """Says a length of all tokens as one of new ones where the model has one of these, by which `generate()` would go."""
    for length, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        given = getattr(config, length)
        if given is not None and getattr(config, new_tokens) is None and getattr(own, new_tokens) is not None:
            setattr(config, new_tokens, max(0, given - prompt_length))
            setattr(config, length, None)


def length_limits(
    model: PreTrainedModel, arguments: Mapping[str, Any], prompt_length: int = 1
) -> tuple[int, int | None]:
    """Fewest and most tokens of a target, the start token counted, by the arguments of `generate()`."""
    settings = settings_of(model, arguments)
    limits = []
    for length, new_tokens in (("min_length", "min_new_tokens"), ("max_length", "max_new_tokens")):
        new = settings.get(new_tokens)
        limits.append(settings.get(length) if new is None else new + prompt_length)
    return limits[0] or 0, limits[1]


def is_of_each_text(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether these arguments of `generate()` lead to the same targets however the texts are put into batches."""
    settings = settings_of(model, arguments)
    is_known = arguments.keys() <= generation_settings() | {"generation_config"}
    return is_known and not any(settings.get(name) for name in _OF_A_BATCH) and not looks_at_padding(settings)


def looks_at_padding(settings: Mapping[str, Any]) -> bool:
    """Whether settings of generation make something of the padding behind a source, of which there is none in a batch of one."""
    return any(settings.get(name) not in (None, neutral) for name, neutral in _OF_PADDING.items())


def pad_behind_ends(
    ids: torch.Tensor, model: PreTrainedModel, arguments: Mapping[str, Any], pad_token_id: int | None
) -> torch.Tensor:
    """Targets `(rows, target)` with padding behind their ends, as in every search but that by beams.

    transformers takes a padding of id 0 for none there, and fills up with ends, as many as the batch has room for.
    """
    ends = settings_of(model, arguments).get("eos_token_id")
    if ends is None or pad_token_id is None:
        return ids
    is_end = torch.isin(ids, torch.as_tensor(ends, device=ids.device))
    # What the decoder starts with may be one, too, and what was given.
    prompt = arguments.get("decoder_input_ids")
    is_end[:, : 1 if prompt is None else prompt.shape[1]] = False
    return ids.masked_fill(is_end.cumsum(dim=1) > is_end.long(), pad_token_id)


def settings_of(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `generate()` goes by: its arguments, a generation config among them, and the model's own."""
    config = arguments.get("generation_config")
    return model.generation_config.to_dict() | ({} if config is None else config.to_diff_dict()) | dict(arguments)

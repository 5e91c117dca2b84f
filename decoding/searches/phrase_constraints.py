"""Parsing and checks of the phrases that a target must contain."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from metaphrase.decoding.searches.phrase_automaton import START, Phrase
from metaphrase.tokenization import encode_phrase


def read_constraints(force_words_ids: Sequence, first_words_ids: Sequence | None = None) -> list[list[Phrase]]:
    """Return the phrases of each constraint.

    Args:
        force_words_ids: For each constraint the ids of a phrase, or several phrases of which one must occur.
        first_words_ids: For each constraint further phrases that count only at the start of the target.

    Raises:
        ValueError: If a list is empty or wrongly nested, or a constraint is repeated.
    """
    if not isinstance(force_words_ids, list | tuple) or not force_words_ids:
        raise ValueError(f"`force_words_ids` must be a list of at least one phrase, got {force_words_ids!r}.")
    firsts = [[]] * len(force_words_ids) if first_words_ids is None else first_words_ids
    if len(firsts) != len(force_words_ids):
        raise ValueError(
            "`first_words_ids` must have a list for each phrase of `force_words_ids`, "
            f"got {len(firsts)} for {len(force_words_ids)}."
        )
    constraints = []
    for words, first in zip(force_words_ids, firsts, strict=True):
        is_set = isinstance(words, list | tuple) and len(words) > 0 and all(isinstance(p, list | tuple) for p in words)
        phrases = [_check_ids(ids, "force_words_ids") for ids in (words if is_set else [words])]
        phrases += [(START, *_check_ids(ids, "first_words_ids")) for ids in first]
        phrases = list(dict.fromkeys(phrases))
        if any(set(phrases) == set(constraint) for constraint in constraints):
            raise ValueError(f"`force_words_ids` must not have a constraint twice, got {list(words)} again.")
        constraints.append(phrases)
    return constraints


def check_constraints(constraints: Sequence[Sequence[Phrase]], vocab_size: int, config: GenerationConfig) -> None:
    """Refuse constraints that no target can meet.

    Args:
        constraints: From `read_constraints`.
        vocab_size: Size of the vocabulary.
        config: The prepared generation config.

    Raises:
        ValueError: If ids are unknown or end a target, or phrases are forbidden.
    """
    if config.num_beams < 2:
        raise ValueError(f"`num_beams` must be at least 2 for constrained beam search, got {config.num_beams}.")
    ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.flatten().tolist()
    # Padding would mean that the target has ended.
    ends += [] if config._pad_token_tensor is None else [int(config._pad_token_tensor)]
    forbidden = [*(config.bad_words_ids or []), *([token] for token in config.suppress_tokens or [])]
    for phrase in (phrase for phrases in constraints for phrase in phrases):
        ids = [token for token in phrase if token is not START]
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise ValueError(f"`force_words_ids` must hold ids from 0 to {vocab_size - 1}, got {ids}.")
        if set(ids) & set(ends):
            raise ValueError(
                f"`force_words_ids` must not hold the end of sequence or padding, got {sorted(set(ids) & set(ends))} in {ids}."
            )
        for words in forbidden:
            if list(words) in (ids[start : start + len(words)] for start in range(len(ids))):
                raise ValueError(f"A phrase must not be both forced and forbidden, got {ids} and {list(words)}.")


def _check_ids(ids: Iterable[int], name: str) -> tuple[int, ...]:
    is_list = isinstance(ids, list | tuple) and len(ids) > 0
    if not is_list or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"A phrase of `{name}` must be a list of at least one token id, got {ids!r}.")
    return tuple(ids)


def encode_phrases(
    tokenizer: PreTrainedTokenizerBase, config: GenerationConfig, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Replace `must_contain` and `never_contain` by the ids of their phrases.

    Args:
        tokenizer: The tokenizer of the targets.
        config: The model's generation config, which may forbid words itself, as Marian's forbids padding.
        options: Arguments of a search.

    Returns:
        The arguments with `force_words_ids`, `first_words_ids` and `special_ids`, and with `bad_words_ids`.

    Raises:
        ValueError: If an option is no list of phrases, phrases are also set as ids, or `encode_phrase` raises it.
    """
    options = dict(options)
    must_contain, never_contain = options.pop("must_contain", None), options.pop("never_contain", None)
    for name, phrases in (("must_contain", must_contain), ("never_contain", never_contain)):
        if phrases is not None and not isinstance(phrases, list | tuple):
            raise ValueError(f"`{name}` must be a list of phrases, got {phrases!r}.")
    if must_contain:
        if options.get("force_words_ids") is not None:
            raise ValueError("`force_words_ids` must be None where `must_contain` is given.")
        options["force_words_ids"], options["first_words_ids"] = [], []
        for phrases in must_contain:
            is_one = isinstance(phrases, str) or not isinstance(phrases, Iterable)
            phrases = [phrases] if is_one else phrases
            encoded = [encode_phrase(tokenizer, phrase) for phrase in phrases]
            options["force_words_ids"].append([ids for inside, _ in encoded for ids in inside])
            options["first_words_ids"].append([ids for _, first in encoded for ids in first])
        options["special_ids"] = sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id})
    if never_contain:
        encoded = [encode_phrase(tokenizer, phrase) for phrase in never_contain]
        forbidden = options.get("bad_words_ids") or config.bad_words_ids or []
        options["bad_words_ids"] = [*forbidden, *(ids for both in encoded for part in both for ids in part)]
    return options

"""Constrained beam search: targets that contain given phrases.

Hypotheses compete only with hypotheses that lack as many tokens of the phrases. All share one beam of fixed width.

Source: Hokamp and Liu 2017 (arXiv 1704.07138); Post and Vilar 2018, section 3 (arXiv 1804.06609).
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding.beam_search import WORST, Beams, BeamState, Selection, beam_search
from metaphrase.decoding.fast_generation import encoded_sources, find_obstacle, prepared_projections
from metaphrase.decoding.options import are_ends
from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import Engine
from metaphrase.tokenization.tokenizer_pair import mode_lock

DEFAULT_NUM_BEAMS = 10
# A phrase is a tuple of token ids. START before them lets the phrase count only at the start of the target.
START = None
Phrase = tuple[int | None, ...]
# Unicode name prefixes of scripts without spaces between words.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE")


def constrained_beam_search(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    force_words_ids: list | None = None,
    first_words_ids: list | None = None,
    special_ids: Sequence[int] = (),
    **kwargs,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """Search for targets with given phrases, as `custom_generate` of `generate(num_beams=..., force_words_ids=...)`.

    Phrases may overlap, and a phrase in the prompt counts. Use `bad_words_ids` for tokens that must not occur. The logits
    processors come before the constraints: a forbidden token is never forced.

    Args:
        force_words_ids: For each constraint the ids of a phrase, or several phrases of which one must occur.
        first_words_ids: For each constraint further phrases that count only at the start of the target.
        special_ids: Ids without text, such as language codes, which do not end the start of the target. The start token,
            ends, padding and a forced first token are added.

    Raises:
        MetaphraseError: If constraints are malformed or do not fit, other options leave a source without such a target, or the
            fast decoder does not support the model or an option.
    """
    config = kwargs["generation_config"]
    if reason := find_obstacle(model, input_ids, **kwargs):
        raise MetaphraseError(f"Required phrases need the fast decoder, which does not support {reason}.")
    vocab_size = model.config.decoder_vocab_size
    if config.num_beams < 2:
        raise MetaphraseError(f"`num_beams` must be at least 2 with required phrases, got {config.num_beams}.")
    special = {name: getattr(config, f"_{name}_token_tensor") for name in ("bos", "decoder_start", "pad", "eos")}
    special = {name: set() if ids is None else set(ids.flatten().tolist()) for name, ids in special.items()}
    forced = config.force_words_ids if force_words_ids is None else force_words_ids
    firsts = [[]] * len(forced) if first_words_ids is None else first_words_ids
    usable = set(range(vocab_size)) - special["eos"] - special["pad"]
    constraints: list[list[Phrase]] = []
    for words, first in zip(forced, firsts, strict=True):
        phrases = words if words and isinstance(words[0], list | tuple) else [words]
        for ids in (*phrases, *first):
            # Padding or an end would mean that the target has ended.
            if not ids or not usable.issuperset(ids):
                raise MetaphraseError(
                    f"Phrases of `force_words_ids` must hold ids below {max(usable) + 1}, and no end or padding, got {ids}."
                )
        constraints.append(list(dict.fromkeys([*map(tuple, phrases), *((START, *ids) for ids in first)])))
    special_ids = {*special_ids, *set().union(*special.values()), config.forced_bos_token_id} - {None}
    automaton = PhraseAutomaton(constraints, vocab_size, input_ids.device, special_ids)
    prompt = input_ids[:: config.num_beams]
    state = BeamState(model.get_decoder(), *encoded_sources(kwargs, config.num_beams))
    project, _ = prepared_projections(model)
    selection = ConstrainedSelection(config, automaton, prompt)
    ids, scores = beam_search(project, state, prompt, kwargs["logits_processor"], config, selection)
    is_lacking = (scores <= WORST / 2).view(len(prompt), -1).any(dim=1)
    if bool(is_lacking.any()):
        raise MetaphraseError(
            "`force_words_ids` must leave each source as many targets as `num_return_sequences`, got fewer for "
            f"{int(is_lacking.sum())} of {len(is_lacking)} sources: other settings, such as `bad_words_ids`, rule them out, or "
            f"`max_new_tokens` or `num_beams` ({config.num_beams}) is too small."
        )
    if not config.return_dict_in_generate:
        return ids
    return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)


class PhraseAutomaton:
    """Aho-Corasick automaton of forced phrases: which phrases a target contains, and how far it is in the next one.

    A constraint is a set of phrases, one of which must occur. A state, an integer, is the longest prefix of a phrase that the
    text ends with. Phrases may overlap, and a phrase counts wherever it occurs. `alphabet` are all tokens of the phrases,
    (alphabet,). `num_tokens` tokens meet all constraints from any state.

    Source: Aho and Corasick 1975, Efficient String Matching (doi 10.1145/360825.360855).
    """

    def __init__(
        self,
        constraints: Sequence[Sequence[Phrase]],
        vocab_size: int,
        device: torch.device | str = "cpu",
        special_ids: Iterable[int] = (),
    ):
        """Build the tables. Each constraint has a phrase without START. `special_ids` do not end the start of a target."""
        shortest = [min(len(phrase) for phrase in phrases if START not in phrase) for phrases in constraints]
        longest = [max(len(phrase) - phrase.count(START) for phrase in phrases) for phrases in constraints]
        prefixes = {phrase[:end] for phrases in constraints for phrase in phrases for end in range(len(phrase) + 1)}
        numbers = {prefix: number for number, prefix in enumerate(sorted(prefixes, key=len))}
        alphabet = sorted({token for prefix in prefixes for token in prefix} - {START})
        # All tokens outside the phrases are symbol 0.
        symbols = torch.zeros(vocab_size, dtype=torch.long)
        special = len(alphabet) + 1
        symbols[[token for token in special_ids if 0 <= token < vocab_size]] = special
        symbols[alphabet] = torch.arange(1, len(alphabet) + 1)
        follow = torch.zeros(len(numbers), special + 1, dtype=torch.long)
        meets = torch.zeros(len(numbers), len(constraints), dtype=torch.bool)
        savings = torch.zeros(len(numbers), len(constraints), dtype=torch.long)
        parts = torch.zeros_like(savings)
        children: dict[Phrase, list[Phrase]] = {prefix: [] for prefix in prefixes}
        for prefix in prefixes - {(), (START,)}:
            children[prefix[:-1]].append(prefix)
        for constraint, phrases in enumerate(constraints):
            for phrase in phrases:
                num_ids = len(phrase) - phrase.count(START)
                for length in range(1, len(phrase) + 1):
                    number, num_left = numbers[phrase[:length]], len(phrase) - length
                    part = (num_ids - num_left) * longest[constraint] // num_ids
                    meets[number, constraint] |= num_left == 0
                    savings[number, constraint] = max(int(savings[number, constraint]), shortest[constraint] - num_left)
                    parts[number, constraint] = max(int(parts[number, constraint]), part)
        # In order of length, a prefix follows its longest proper suffix that is a prefix of a phrase, too.
        for prefix, number in numbers.items():
            if prefix:
                suffix = next(prefix[start:] for start in range(1, len(prefix) + 1) if prefix[start:] in numbers)
                follow[number] = follow[numbers[suffix]]
                for table in (meets, savings, parts):
                    table[number] = torch.maximum(table[number], table[numbers[suffix]])
            for child in children[prefix]:
                follow[number, symbols[child[-1]]] = numbers[child]
        self.start = numbers.get((START,), 0)
        follow[self.start, special] = self.start
        self.num_constraints, self.num_tokens, self.most_progress = len(constraints), sum(shortest), sum(longest)
        self.alphabet = torch.tensor(alphabet, dtype=torch.long, device=device)
        self._symbols, self._follow, self._meets = symbols.to(device), follow.to(device), meets.to(device)
        self._shortest, self._longest = (torch.tensor(lengths, device=device) for lengths in (shortest, longest))
        self._savings, self._parts = savings.to(device), parts.to(device)

    def read(
        self, states: torch.Tensor, is_met: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states (...) and the met constraints (..., constraints) behind one more token (...) of each target."""
        states = self._follow[states, self._symbols[tokens]]
        return states, is_met | self._meets[states]

    def num_missing(self, states: torch.Tensor, is_met: torch.Tensor) -> torch.Tensor:
        """Return how many more tokens meet all constraints, shape (...). Above 0, some token always lowers the number.

        Overlaps of phrases are not counted: fewer tokens may be enough.
        """
        missing = (~is_met).long()
        return (missing * self._shortest).sum(dim=-1) - (missing * self._savings[states]).amax(dim=-1)

    def progress(self, states: torch.Tensor, is_met: torch.Tensor) -> torch.Tensor:
        """Return how many tokens are met, shape (...): those of met constraints, and of the most advanced phrase.

        A constraint counts as many tokens as its longest phrase, and part of a phrase the same part of these tokens.
        """
        met = is_met.long()
        return (met * self._longest).sum(dim=-1) + ((1 - met) * self._parts[states]).amax(dim=-1)


class ConstrainedSelection(Selection):
    """Selection by banks: hypotheses that have met equally many tokens of the phrases form a bank.

    A hypothesis may end when all constraints are met, and is dropped when they no longer fit.
    """

    def __init__(self, config: GenerationConfig, automaton: PhraseAutomaton, prompt: torch.Tensor):
        """Read the prompts, shape (sources, length), behind their start token."""
        super().__init__(config)
        self._automaton = automaton
        # A forced end takes the last position.
        self._num_reserved = int(config.forced_eos_token_id is not None)
        # (sources, beams) and (sources, beams, constraints)
        self._states = torch.full_like(prompt[:, :1], automaton.start).expand(-1, config.num_beams)
        self._is_met = self._states.new_zeros((*self._states.shape, automaton.num_constraints), dtype=torch.bool)
        for tokens in prompt.unbind(1)[1:]:
            self._states, self._is_met = automaton.read(self._states, self._is_met, tokens[:, None])

    def select_sources(self, sources: torch.Tensor) -> None:
        self._states, self._is_met = self._states[sources], self._is_met[sources]

    def choose(self, log_probs: torch.Tensor, beams: Beams, num_left: int) -> tuple[torch.Tensor, ...]:
        num_beams, vocab_size = log_probs.shape[1:]
        log_probs = self._mask_dead_ends(log_probs, max(num_left - self._num_reserved, 0))
        scores, candidates = self._pool(log_probs + beams.scores[:, :, None])
        parents, tokens = candidates // vocab_size, candidates % vocab_size
        states, is_met = self._automaton.read(
            self._states.take_along_dim(parents, dim=1), self._is_met.take_along_dim(parents[..., None], dim=1), tokens
        )
        # (sources, candidates)
        progress = self._automaton.progress(states, is_met)
        is_possible = scores > WORST / 2
        is_end = are_ends(tokens, self.ends) | (num_left == 0)
        # An ending hypothesis competes for the beam with all others; continuations then compete among themselves.
        in_beam = torch.zeros_like(is_end).scatter_(1, self._allocate(progress, is_possible)[:, :num_beams], True)
        chosen = self._allocate(progress, is_possible & ~is_end)[:, :num_beams]
        chosen_scores = scores.masked_fill(is_end | ~is_possible, WORST).take_along_dim(chosen, dim=1)
        chosen_scores, best = chosen_scores.sort(dim=1, descending=True, stable=True)
        chosen = chosen.take_along_dim(best, dim=1)
        self._states = states.take_along_dim(chosen, dim=1)
        self._is_met = is_met.take_along_dim(chosen[..., None], dim=1)
        return scores, parents, tokens, is_end & in_beam & is_possible, chosen, chosen_scores

    def _mask_dead_ends(self, log_probs: torch.Tensor, num_left: int) -> torch.Tensor:
        """Mask ends that come too early, and tokens behind which the phrases no longer fit."""
        log_probs = log_probs.clone()
        if self.ends is not None:
            # An end such as -1 is no token.
            ends = self.ends[(self.ends >= 0) & (self.ends < log_probs.shape[-1])]
            is_early = ~self._is_met.all(dim=-1, keepdim=True)
            log_probs[:, :, ends] = log_probs[:, :, ends].masked_fill(is_early, -torch.inf)
        if num_left >= self._automaton.num_tokens:
            return log_probs
        alphabet = self._automaton.alphabet
        fits = self._automaton.num_missing(*self._behind_alphabet()) <= num_left
        of_alphabet = log_probs[:, :, alphabet].masked_fill(~fits, -torch.inf)
        # All other tokens lead to the root, state 0.
        fits = self._automaton.num_missing(torch.zeros_like(self._states), self._is_met) <= num_left
        log_probs = log_probs.masked_fill(~fits[:, :, None], -torch.inf)
        log_probs[:, :, alphabet] = of_alphabet
        return log_probs

    def _pool(self, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return candidates, best first: the best of all, all that advance a phrase, and the best of each hypothesis.

        From sums of log-probabilities (sources, beams, V) to scores and indices into (beams * V), both (sources, candidates).
        """
        num_beams, vocab_size = totals.shape[1:]
        alphabet = self._automaton.alphabet
        best = totals.flatten(1).topk(min(self.num_candidates, num_beams * vocab_size)).indices
        advances = self._automaton.progress(*self._behind_alphabet()) > self._automaton.progress(
            self._states, self._is_met
        ).unsqueeze(-1)
        is_candidate = torch.zeros_like(totals, dtype=torch.bool)
        is_candidate[:, :, alphabet] = advances
        is_candidate.scatter_(2, totals.argmax(dim=-1, keepdim=True), True)
        is_candidate = is_candidate.flatten(1).scatter_(1, best, True)
        count = min(self.num_candidates + num_beams * (1 + len(alphabet)), num_beams * vocab_size)
        return totals.flatten(1).masked_fill(~is_candidate, -torch.inf).topk(count)

    def _behind_alphabet(self) -> tuple[torch.Tensor, torch.Tensor]:
        # The states and met constraints behind each token of the phrases, (sources, beams, alphabet).
        return self._automaton.read(self._states[..., None], self._is_met[:, :, None], self._automaton.alphabet)

    def _allocate(self, progress: torch.Tensor, is_eligible: torch.Tensor) -> torch.Tensor:
        """Return the order in which candidates enter the beam: the best of each bank, the second best of each, and so on.

        Banks have equal shares, and a bank's unused share goes to the others. Banks with more progress come first, and
        candidates that are not eligible last. All shapes are (sources, candidates), best candidate first.
        """
        num_banks = self._automaton.most_progress + 1
        banks = torch.arange(num_banks, device=progress.device)
        is_in_bank = (progress[:, :, None] == banks) & is_eligible[:, :, None]
        rank = is_in_bank.cumsum(dim=1).take_along_dim(progress[:, :, None], dim=2)[:, :, 0]
        order = rank * num_banks + (num_banks - 1 - progress)
        return order.masked_fill(~is_eligible, torch.iinfo(order.dtype).max).argsort(dim=1, stable=True)


def encode_phrase(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids that write a phrase in a target.

    Inside a text, a space precedes a word. A phrase that begins with punctuation may also follow without a space, and a
    phrase in a script without spaces, such as Chinese or Thai, always does. White space around the phrase is ignored.

    Returns:
        Ids of the phrase inside a text, most usual first, and different ids of the phrase at the start of a text, if any.

    Raises:
        MetaphraseError: If the phrase is empty, or the tokenizer cannot write it.
    """
    text = text.strip()
    is_unspaced = unicodedata.name(text[:1] or " ", "").startswith(_UNSPACED)
    fronts = ([] if is_unspaced else [" "]) + ([""] if is_unspaced or not text[:1].isalnum() else [])
    inside = [_encode_behind(tokenizer, front + text) for front in fronts]
    inside = [ids for index, ids in enumerate(inside) if ids not in inside[:index]]
    first = _encode_bare(tokenizer, text)
    if not text or not all(ids and tokenizer.unk_token_id not in ids for ids in (*inside, first)):
        raise MetaphraseError(f"A phrase must be a text that the tokenizer can write, got {text!r}.")
    return inside, [first] if first not in inside else []


def _encode_bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    with mode_lock(tokenizer):
        return tokenizer(text_target=text, add_special_tokens=False, verbose=False)["input_ids"]


def _encode_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text that follows another text: the first of several that keeps its own tokens."""
    for anchor in ("a", ",", "1", "the"):
        before, both = _encode_bare(tokenizer, anchor), _encode_bare(tokenizer, anchor + text)
        if before and both[: len(before)] == before and tokenizer.unk_token_id not in before:
            return both[len(before) :]
    return _encode_bare(tokenizer, text)


def require_phrases(
    model: PreTrainedModel | Engine, options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, Any]:
    """Return the options of a search for targets with phrases, and without others.

    The tokenizer encodes the texts of `must_contain` and `never_contain`. A torch model gets beams, and no sampling unless the
    caller asks for it. The model's generation config may forbid words itself, as Marian's forbids padding.
    """
    options, config = dict(options), model.generation_config
    must_contain, never_contain = options.pop("must_contain", None), options.pop("never_contain", None)
    for name, phrases in (("must_contain", must_contain), ("never_contain", never_contain)):
        # Each character of a text would be a phrase.
        if isinstance(phrases, str):
            raise MetaphraseError(f"`{name}` must be a list of phrases, got {phrases!r}.")
    if must_contain:
        if options.get("force_words_ids") is not None:
            raise MetaphraseError("`must_contain` and `force_words_ids` are the same and must not be given together.")
        options["force_words_ids"], options["first_words_ids"] = [], []
        for phrases in must_contain:
            phrases = phrases if isinstance(phrases, list | tuple) else [phrases]
            encoded = [encode_phrase(tokenizer, phrase) for phrase in phrases]
            options["force_words_ids"].append([ids for inside, _ in encoded for ids in inside])
            options["first_words_ids"].append([ids for _, first in encoded for ids in first])
        options["special_ids"] = sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id})
    if never_contain:
        encoded = [encode_phrase(tokenizer, phrase) for phrase in never_contain]
        forbidden = options.get("bad_words_ids") or config.bad_words_ids or []
        options["bad_words_ids"] = [*forbidden, *(ids for both in encoded for part in both for ids in part)]
    if not options.get("force_words_ids") or not isinstance(model, torch.nn.Module):
        return options
    default = config.num_beams or 1
    num_beams = options.get("num_beams") or (default if default > 1 else DEFAULT_NUM_BEAMS)
    return {"do_sample": False, **options, "num_beams": num_beams, "custom_generate": constrained_beam_search}

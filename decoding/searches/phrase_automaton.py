"""Aho-Corasick automaton of forced phrases: which phrases a target contains, and how far it is in the next one.

A state is the longest prefix of a phrase that the text ends with. Phrases may overlap, and a phrase counts wherever it occurs.

Source: Aho and Corasick 1975, Efficient String Matching (doi 10.1145/360825.360855).
"""

from collections.abc import Iterable, Sequence

import torch

# A phrase is a tuple of token ids. START before them lets the phrase count only at the start of the target.
START = None
Phrase = tuple[int | None, ...]


class PhraseAutomaton:
    """Tables that follow targets token by token.

    A constraint is a set of phrases, one of which must occur. States are integers.

    Attributes:
        start: State of an empty target.
        alphabet: All tokens of the phrases, shape (alphabet,).
        num_constraints: Number of constraints.
        num_tokens: Number of tokens that meet all constraints from any state.
        most_progress: Progress of a target that meets all constraints.
    """

    def __init__(
        self,
        constraints: Sequence[Sequence[Phrase]],
        vocab_size: int,
        device: torch.device | str = "cpu",
        special_ids: Iterable[int] = (),
    ):
        """Build the tables.

        Args:
            constraints: Phrases of each constraint, at least one of them without START.
            vocab_size: Size of the vocabulary.
            device: Device of the tables.
            special_ids: Ids without text, such as language codes, which do not end the start of a target.
        """
        shortest = [min(len(phrase) for phrase in phrases if START not in phrase) for phrases in constraints]
        longest = [max(len(phrase) - phrase.count(START) for phrase in phrases) for phrases in constraints]
        prefixes = {
            phrase[:length] for phrases in constraints for phrase in phrases for length in range(len(phrase) + 1)
        }
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
        self._shortest = torch.tensor(shortest, dtype=torch.long, device=device)
        self._longest = torch.tensor(longest, dtype=torch.long, device=device)
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

"""Aho-Corasick automaton of forced phrases: which phrases a target contains, and how far it is in the next one.

Each node of the tree of phrases falls back to the longest other prefix of a phrase that the text ends with. Phrases may
overlap, and a phrase counts wherever it occurs.

Source: Aho and Corasick 1975, Efficient String Matching (doi 10.1145/360825.360855).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

# Exact distances need a table of 2 ** constraints columns.
MOST_EXACT_CONSTRAINTS = 8


@dataclass(frozen=True)
class Phrase:
    """Consecutive tokens that a target must contain.

    Attributes:
        ids: The token ids.
        is_first: True if the phrase counts only at the start of the target.
    """

    ids: tuple[int, ...]
    is_first: bool = False

    def symbols(self) -> Iterator[int | None]:
        """Yield the phrase's symbols: None for the start of a target, then its tokens."""
        if self.is_first:
            yield None
        yield from self.ids


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
            constraints: Phrases of each constraint, at least one of them with `is_first` false.
            vocab_size: Size of the vocabulary.
            device: Device of the tables.
            special_ids: Ids without text, such as language codes, which do not end the start of a target.
        """
        shortest = [min(len(phrase.ids) for phrase in phrases if not phrase.is_first) for phrases in constraints]
        longest = [max(len(phrase.ids) for phrase in phrases) for phrases in constraints]
        tree, owners = _tree(constraints)
        alphabet = sorted({token for phrases in constraints for phrase in phrases for token in phrase.ids})
        # All tokens outside the phrases are symbol 0.
        symbols = torch.zeros(vocab_size, dtype=torch.long)
        special = len(alphabet) + 1
        symbols[[token for token in special_ids if 0 <= token < vocab_size]] = special
        symbols[alphabet] = torch.arange(1, len(alphabet) + 1)
        follow = torch.zeros(len(tree), special + 1, dtype=torch.long)
        meets = torch.zeros(len(tree), len(constraints), dtype=torch.bool)
        savings = torch.zeros(len(tree), len(constraints), dtype=torch.long)
        parts = torch.zeros_like(savings)
        # In order of depth, a node follows the node that it falls back to.
        fallback = _fallbacks(tree)
        for node in sorted(range(len(tree)), key=lambda index: tree[index].depth):
            if node:
                for table in (follow, meets, savings, parts):
                    table[node] = table[fallback[node]]
            for symbol, child in tree[node].children.items():
                if symbol is not None:
                    follow[node, symbols[symbol]] = child
            for constraint, num_read, num_left in owners[node]:
                part = num_read * longest[constraint] // (num_read + num_left)
                meets[node, constraint] |= num_left == 0
                savings[node, constraint] = max(int(savings[node, constraint]), shortest[constraint] - num_left)
                parts[node, constraint] = max(int(parts[node, constraint]), part)
        self.start = tree[0].children.get(None, 0)
        follow[self.start, special] = self.start
        self.num_constraints, self.num_tokens, self.most_progress = len(constraints), sum(shortest), sum(longest)
        self._distances = None
        if 0 < len(constraints) <= MOST_EXACT_CONSTRAINTS:
            self._distances = _distances(follow, meets).to(device)
            self.num_tokens = int(self._distances[0, 0])
        self.alphabet = torch.tensor(alphabet, dtype=torch.long, device=device)
        self._symbols, self._follow, self._meets = symbols.to(device), follow.to(device), meets.to(device)
        self._shortest = torch.tensor(shortest, dtype=torch.long, device=device)
        self._longest = torch.tensor(longest, dtype=torch.long, device=device)
        self._savings, self._parts = savings.to(device), parts.to(device)

    def read(
        self, states: torch.Tensor, is_met: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one more token of each target.

        Args:
            states: States of the targets, shape (...).
            is_met: Met constraints, shape (..., constraints).
            tokens: The next tokens, shape (...).

        Returns:
            The new states and met constraints.
        """
        states = self._follow[states, self._symbols[tokens]]
        return states, is_met | self._meets[states]

    def num_missing(self, states: torch.Tensor, is_met: torch.Tensor) -> torch.Tensor:
        """Return how many more tokens meet all constraints, shape (...). Above 0, some token always lowers the number.

        With more than `MOST_EXACT_CONSTRAINTS` constraints, overlaps of phrases are not counted.
        """
        if self.num_constraints == 0:
            return torch.zeros_like(states)
        if self._distances is not None:
            return self._distances[states, (is_met * _bits(self.num_constraints, is_met.device)).sum(dim=-1)]
        missing = (~is_met).long()
        return (missing * self._shortest).sum(dim=-1) - (missing * self._savings[states]).amax(dim=-1)

    def progress(self, states: torch.Tensor, is_met: torch.Tensor) -> torch.Tensor:
        """Return how many tokens are met, shape (...): those of met constraints, and of the most advanced phrase.

        A constraint counts as many tokens as its longest phrase, and part of a phrase the same part of these tokens.
        """
        if self.num_constraints == 0:
            return torch.zeros_like(states)
        met = is_met.long()
        return (met * self._longest).sum(dim=-1) + ((1 - met) * self._parts[states]).amax(dim=-1)


@dataclass
class _Node:
    """A prefix of phrases."""

    depth: int
    children: dict[int | None, int]


def _tree(constraints: Sequence[Sequence[Phrase]]) -> tuple[list[_Node], list[list[tuple[int, int, int]]]]:
    """Return all prefixes, and for each its constraints, with the number of tokens of the phrase read and left."""
    tree, owners = [_Node(0, {})], [[]]
    for constraint, phrases in enumerate(constraints):
        for phrase in phrases:
            symbols, node = list(phrase.symbols()), 0
            for depth, symbol in enumerate(symbols, start=1):
                child = tree[node].children.get(symbol)
                if child is None:
                    child = tree[node].children[symbol] = len(tree)
                    tree.append(_Node(depth, {}))
                    owners.append([])
                num_left = len(symbols) - depth
                owners[child].append((constraint, len(phrase.ids) - num_left, num_left))
                node = child
    return tree, owners


def _fallbacks(tree: list[_Node]) -> list[int]:
    """Return for each node the node of its longest proper suffix; 0 is the root."""
    fallback = [0] * len(tree)
    for node in sorted(range(len(tree)), key=lambda index: tree[index].depth):
        for symbol, child in tree[node].children.items():
            suffix = fallback[node]
            while suffix and symbol not in tree[suffix].children:
                suffix = fallback[suffix]
            target = tree[suffix].children.get(symbol, 0)
            fallback[child] = target if target != child else 0
    return fallback


def _bits(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return 2 ** torch.arange(count, device=device)


def _distances(follow: torch.Tensor, meets: torch.Tensor) -> torch.Tensor:
    """Return how many tokens meet all constraints, from each node and set of met constraints, shape (nodes, sets).

    `follow` (nodes, symbols) holds next nodes, and `meets` (nodes, constraints) the constraints that a node meets. Bit i of
    a set's number is constraint i.
    """
    num_nodes, num_constraints = meets.shape
    full = 2**num_constraints - 1
    bits = (meets * _bits(num_constraints)).sum(dim=1)
    far = torch.iinfo(torch.long).max // 2
    distances = torch.full((num_nodes, full + 1), far)
    distances[:, full] = 0
    # Constraints are only added, so larger sets come first.
    for met in range(full - 1, -1, -1):
        behind = met | bits[follow]
        while True:
            nearer = torch.minimum(distances[:, met], 1 + distances[follow, behind].amin(dim=1))
            if torch.equal(nearer, distances[:, met]):
                break
            distances[:, met] = nearer
    return distances

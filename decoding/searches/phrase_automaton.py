"""The phrase automaton: which of the phrases that a target must contain it contains, and how far it is with the next one.

Source: Aho and Corasick 1975, Efficient String Matching (doi 10.1145/360825.360855): a tree of all phrases, in which each place
knows the longest other beginning of a phrase that the text ends with. So phrases may overlap, and a phrase counts however the
target came to contain it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

# With more constraints than these, the combinations of met and unmet ones are too many to be told apart.
MOST_EXACT_CONSTRAINTS = 8


@dataclass(frozen=True)
class Phrase:
    """Tokens that a target is to contain side by side.

    Attributes:
        ids: The tokens.
        is_first: Whether they count only where the target begins with them.
    """

    ids: tuple[int, ...]
    is_first: bool = False

    def symbols(self) -> Iterator[int | None]:
        """What a target is read as: its start, `None`, and its tokens."""
        if self.is_first:
            yield None
        yield from self.ids


class PhraseAutomaton:
    """Follows targets token by token.

    A constraint is a set of phrases, one of which must occur. States are numbers; `start` is that of a target without text.

    Attributes:
        alphabet: All tokens of the phrases, `(alphabet)`.
        num_constraints: How many constraints there are.
        num_tokens: How many tokens meet all of them, wherever the target is; at most this many are missing.
        most_progress: Progress where all of them are met.
    """

    def __init__(
        self,
        constraints: Sequence[Sequence[Phrase]],
        vocab_size: int,
        device: torch.device | str = "cpu",
        special_ids: Iterable[int] = (),
    ):
        """Builds the tables.

        Args:
            constraints: Phrases of each constraint, at least one of them with `is_first` false.
            vocab_size: Tokens there are.
            device: Where the tables are to be.
            special_ids: Tokens that are no text, such as the code of a language: behind them alone a target still begins.
        """
        shortest = [min(len(phrase.ids) for phrase in phrases if not phrase.is_first) for phrases in constraints]
        longest = [max(len(phrase.ids) for phrase in phrases) for phrases in constraints]
        tree, owners = _tree(constraints)
        alphabet = sorted({token for phrases in constraints for phrase in phrases for token in phrase.ids})
        # Tokens that are in no phrase are all the same: symbol 0.
        symbols = torch.zeros(vocab_size, dtype=torch.long)
        special = len(alphabet) + 1
        symbols[[token for token in special_ids if 0 <= token < vocab_size]] = special
        symbols[alphabet] = torch.arange(1, len(alphabet) + 1)
        follow = torch.zeros(len(tree), special + 1, dtype=torch.long)
        meets = torch.zeros(len(tree), len(constraints), dtype=torch.bool)
        savings = torch.zeros(len(tree), len(constraints), dtype=torch.long)
        parts = torch.zeros_like(savings)
        # A node comes after all shorter ones, and so after the one that it falls back to.
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
        """Reads a token more.

        Args:
            states: Where targets are, `(...)`.
            is_met: Which constraints they meet, `(..., constraints)`.
            tokens: What they go on with, `(...)`.

        Returns:
            Their states and the constraints they meet then.
        """
        states = self._follow[states, self._symbols[tokens]]
        return states, is_met | self._meets[states]

    def num_missing(self, states: torch.Tensor, is_met: torch.Tensor) -> torch.Tensor:
        """With how many tokens more all constraints can be met, `(...)`.

        With more than `MOST_EXACT_CONSTRAINTS` constraints it is told for phrases one after the other, without overlaps.
        As long as it is above 0 there is a token that lowers it.
        """
        if self.num_constraints == 0:
            return torch.zeros_like(states)
        if self._distances is not None:
            return self._distances[states, (is_met * _bits(self.num_constraints, is_met.device)).sum(dim=-1)]
        missing = (~is_met).long()
        return (missing * self._shortest).sum(dim=-1) - (missing * self._savings[states]).amax(dim=-1)

    def progress(self, states: torch.Tensor, is_met: torch.Tensor) -> torch.Tensor:
        """How many tokens of the phrases are met, `(...)`: those of met constraints, and of the phrase that is furthest.

        Each constraint counts as many tokens as its longest phrase has, and part of a phrase as that part of them.
        """
        if self.num_constraints == 0:
            return torch.zeros_like(states)
        met = is_met.long()
        return (met * self._longest).sum(dim=-1) + ((1 - met) * self._parts[states]).amax(dim=-1)


@dataclass
class _Node:
    """A beginning of phrases."""

    depth: int
    children: dict[int | None, int]


def _tree(constraints: Sequence[Sequence[Phrase]]) -> tuple[list[_Node], list[list[tuple[int, int, int]]]]:
    """All beginnings of phrases, and for each its constraints, with how many tokens of the phrase are read and left."""
    tree, owners = [_Node(0, {})], [[]]
    for constraint, phrases in enumerate(constraints):
        for phrase in phrases:
            symbols, node = list(phrase.symbols()), 0
            for place, symbol in enumerate(symbols, start=1):
                child = tree[node].children.get(symbol)
                if child is None:
                    child = tree[node].children[symbol] = len(tree)
                    tree.append(_Node(place, {}))
                    owners.append([])
                num_left = len(symbols) - place
                owners[child].append((constraint, len(phrase.ids) - num_left, num_left))
                node = child
    return tree, owners


def _fallbacks(tree: list[_Node]) -> list[int]:
    """For each node the one of its longest proper ending that is a node too; 0 is the root."""
    fallback = [0] * len(tree)
    for node in sorted(range(len(tree)), key=lambda index: tree[index].depth):
        for symbol, child in tree[node].children.items():
            ending = fallback[node]
            while ending and symbol not in tree[ending].children:
                ending = fallback[ending]
            found = tree[ending].children.get(symbol, 0)
            fallback[child] = found if found != child else 0
    return fallback


def _bits(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return 2 ** torch.arange(count, device=device)


def _distances(follow: torch.Tensor, meets: torch.Tensor) -> torch.Tensor:
    """How many tokens lead from each node, with each set of constraints met, to all of them.

    Args:
        follow: Nodes behind each symbol, `(nodes, symbols)`.
        meets: Which constraints a node meets, `(nodes, constraints)`.

    Returns:
        `(nodes, sets)`; bit i of a set's number stands for constraint i.
    """
    num_nodes, num_constraints = meets.shape
    full = 2**num_constraints - 1
    bits = (meets * _bits(num_constraints)).sum(dim=1)
    far = torch.iinfo(torch.long).max // 2
    distances = torch.full((num_nodes, full + 1), far)
    distances[:, full] = 0
    # Constraints are only ever added, so that larger numbers come first.
    for met in range(full - 1, -1, -1):
        behind = met | bits[follow]
        while True:
            nearer = torch.minimum(distances[:, met], 1 + distances[follow, behind].amin(dim=1))
            if torch.equal(nearer, distances[:, met]):
                break
            distances[:, met] = nearer
    return distances

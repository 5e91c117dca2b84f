"""Recombination: pairs that are deeper and longer than those of the files, made of parts that the files show."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, permutations
from random import Random
from typing import NamedTuple

from metaphrase.augmentation.rare_words import find_translations

# Share of the pairs for which a regularity must hold.
_NEARLY_ALL = 0.99
# Pairs that show how targets are written.
_SHOWN_PAIRS = 500
# Words of a source that is read. Targets of a pattern: with more, the pattern does not tell which belongs to which.
_MOST_WORDS, _MOST_TARGETS = 64, 10
# Words of an addition, and words before and behind it that its target may name.
_LONGEST_ADDITION, _REACH = 8, 4
# Words before an addition that must be as in training.
_LEFT = 2
# Known pairs that an addition must predict, for a word behind it.
_LEAST_CHECKS = 3
# Two places are alike if pairs within them share so many neighbors.
_ALIKE = 2 / 3
_MAX_ADDITIONS, _MAX_DEPTH = 14, 12
# Lengths relative to the longest pair of training.
_MAX_GROWTH = 4
# Texts kept of each addition, and fillers that are tried.
_MAX_TEXTS, _TRIES = 200, 4
# Share of inner pairs that stay.
_KEPT = 0.2
_OUTSIDE = "\n"
# Before all places.
_FAR = -(10**9)


class Link(NamedTuple):
    """Target token that follows a word of the source: its translation, or the number of its place."""

    word: int
    is_number: bool


Statement = tuple[str | Link, ...]
# A word, or the number of its class if the target follows it.
Pattern = tuple[str | int, ...]
# Symbols of a pattern before and behind a pair inside it.
Place = tuple[str | int, str | int]
# Start and end of the words of a pair inside another one, its part of the target, and its place.
Span = tuple[int, int, Statement, Place]


class Reading(NamedTuple):
    """A pair as words of the source, without capital and end mark, and statements of the target.

    Statements are sorted by the first place that they name. A target that names no places is one statement.
    """

    words: tuple[str, ...]
    statements: tuple[Statement, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.statements))


def _shift(statement: Statement, start: int, number: int) -> Statement:
    """Return a statement whose links from the place `start` on are moved by a number of words."""
    return tuple(
        token if isinstance(token, str) or token.word < start else token._replace(word=token.word + number)
        for token in statement
    )


def _first_place(statement: Statement) -> int:
    return next((token.word for token in statement if isinstance(token, Link) and token.is_number), -1)


def _template(statement: Statement) -> tuple[str | bool, ...]:
    return tuple(token if isinstance(token, str) else token.is_number for token in statement)


class PairReader:
    """Reader and writer of pairs, whose rules are learned from the pairs.

    - The first word has a capital, or the last word is the same mark, in nearly all sources.
    - Target words follow source words: each occurs where its source word does, and nearly nowhere else.
    - Numbers in the target name words of the source, from 0 or 1 on. Then the target is a sequence of statements with
      separators between them, sorted by the first word that they name. With two separators, some kinds of statements
      come first.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]):
        split = [(source.split(), target.split()) for source, target in pairs]
        longer = [source for source, _ in split if len(source) > 1]
        self._inside = Counter(word for source in longer for word in source[1:])
        least = _NEARLY_ALL * len(longer)
        last = Counter(source[-1] for source in longer)
        self.end_mark = next((mark for mark in last if last[mark] >= least and not mark.isalnum()), None)
        self._has_capitals = sum(source[0][:1].isupper() for source in longer) >= least
        bare = [(self._bare(source), target) for source, target in split]
        known = find_translations(bare)
        counts = Counter(word for _, target in bare for word in set(target))
        followed = Counter(word for source, target in bare for word in set(target).intersection(map(known.get, source)))
        self.translations = {
            word: target
            for word, target in known.items()
            if followed[target] >= 0.95 * counts[target] and any(map(str.isalnum, target))
        }
        # Target words that always occur as often as their source words.
        self._single = {*self.translations.values()}
        for source, target in bare:
            numbers = Counter(map(self.translations.get, source))
            self._single -= {word for word in numbers if target.count(word) != numbers[word]}
        self.first_number = self._find_first_number(bare)
        self._separators: tuple[str, ...] = ()
        self._ranks: dict[tuple[str | bool, ...], int] = {}
        if self.first_number is not None:
            links = [tokens for source, target in bare if (tokens := self._link(source, target)) is not None]
            self._learn_separators(links[:_SHOWN_PAIRS])

    def _bare(self, words: Sequence[str]) -> tuple[str, ...]:
        words = tuple(words[:-1] if words[-1:] == [self.end_mark] else words)
        if not words or not self._has_capitals:
            return words
        first = words[0][:1].lower() + words[0][1:]
        return (first if self._inside[first] else words[0], *words[1:])

    def _find_first_number(self, pairs: Sequence[tuple[tuple[str, ...], list[str]]]) -> int | None:
        """Return the number of the first word, if numbers name words that the target follows."""
        named, num_numbers = [0, 0], 0
        for words, target in pairs:
            for number in map(int, filter(str.isdecimal, target if len(words) > 1 else ())):
                num_numbers += 1
                for first in (0, 1):
                    is_inside = 0 <= number - first < len(words)
                    named[first] += is_inside and self.translations.get(words[number - first]) in target
        best = named.index(max(named))
        return best if num_numbers > len(pairs) / 2 and named[best] >= _NEARLY_ALL * num_numbers else None

    def _link(self, words: Sequence[str], target: Sequence[str]) -> Statement | None:
        """Return the target with links. None if it is unknown which of several words with the same translation it follows."""
        places: dict[str | None, list[int]] = defaultdict(list)
        for place, word in enumerate(words):
            places[self.translations.get(word)].append(place)
        tokens, number = [], None
        for index, token in reversed([*enumerate(target)]):
            if self.first_number is not None and token.isdecimal():
                number = int(token) - self.first_number
                tokens.append(Link(number, True))
            elif not (candidates := places.get(token)):
                tokens.append(token)
            elif len(candidates) == 1 or number in candidates:
                # The next number tells which of several words it is.
                tokens.append(Link(candidates[0] if len(candidates) == 1 else number, False))
            elif token in self._single and len(candidates) == target.count(token):
                # Words without copies are taken in order.
                tokens.append(Link(candidates[target[:index].count(token)], False))
            else:
                return None
        return tuple(reversed(tokens))

    def _learn_separators(self, targets: Sequence[Statement]) -> None:
        """Learn the one or two separators that leave the fewest kinds of statements, each with a number."""
        counts = Counter(token for target in targets for token in set(target) if isinstance(token, str))
        ends = {token for target in targets for token in target[:1] + target[-1:]}
        names = [token for token, count in counts.items() if count >= len(targets) / 20 and token not in ends]
        fewest, best = math.inf, None
        for separators in (*((name,) for name in names), *permutations(names, 2)):
            self._separators = separators
            # Few targets show that most separators are none.
            if sum(map(self._has_number_in_each, targets[:20])) < _NEARLY_ALL * len(targets[:20]):
                continue
            ranks: dict[tuple[str | bool, ...], Counter] = defaultdict(Counter)
            for rank, statement in (part for target in targets for part in self._split(target)):
                ranks[_template(statement)][rank] += 1
            self._ranks = {template: rank.most_common(1)[0][0] for template, rank in ranks.items()}
            # The statements, sorted, make a regular target again.
            is_regular = (self._has_number_in_each(one) and self._join(self._sort(one)) == one for one in targets)
            if len(ranks) < fewest and sum(is_regular) >= _NEARLY_ALL * len(targets):
                fewest, best = len(ranks), (separators, self._ranks)
        self._separators, self._ranks = best or ((), {})
        if best is None:
            self.first_number = None

    def _split(self, target: Statement) -> list[tuple[int, Statement]]:
        """Return the statements, each with the number of the separator behind it."""
        parts, start = [], 0
        for end, token in enumerate(target):
            if token in self._separators:
                parts.append((self._separators.index(token), target[start:end]))
                start = end + 1
        return [*parts, (len(self._separators) - 1, target[start:])]

    def _has_number_in_each(self, target: Statement) -> bool:
        places = [_first_place(statement) >= 0 for _, statement in self._split(target)]
        return all(places) or len(places) == 1

    def _sort(self, target: Statement) -> tuple[Statement, ...]:
        return tuple(sorted((statement for _, statement in self._split(target)), key=_first_place))

    def _join(self, statements: Sequence[Statement]) -> Statement:
        if not self._separators:
            return statements[0]
        ranked = sorted(((self._ranks.get(_template(part), 0), part) for part in statements), key=lambda item: item[0])
        return tuple(token for rank, part in ranked for token in (*part, self._separators[rank]))[:-1]

    def read(self, source: str, target: str) -> Reading | None:
        """Return the reading of a pair. None if it has words with the same translation, or is written unlike the others."""
        words = self._bare(source.split())
        if (tokens := self._link(words, target.split())) is None or not words:
            return None
        reading = Reading(words, self._sort(tokens))
        return reading if self.write(reading) == (source, target) else None

    def write(self, reading: Reading) -> tuple[str, str]:
        words, target = reading.words, []
        for token in self._join(reading.statements):
            if isinstance(token, Link):
                token = str(token.word + self.first_number) if token.is_number else self.translations[words[token.word]]
            target.append(token)
        if self._has_capitals:
            words = (words[0][:1].upper() + words[0][1:], *words[1:])
        return " ".join((*words, self.end_mark) if self.end_mark else words), " ".join(target)


class Addition(NamedTuple):
    """Words that may be added to a source, and what they add to the target.

    Attributes:
        left: The pattern before the addition.
        added: Its own pattern.
        right: The pattern behind it, as far as the target names it.
        statements: What the target gets. Places count from the beginning of the addition. In a target without numbers, the
            tokens stand behind the word before the addition.
    """

    left: Pattern
    added: Pattern
    right: Pattern
    statements: tuple[Statement, ...]

    @property
    def kind(self) -> tuple[int, ...]:
        return tuple(word for word in self.added if isinstance(word, int))


class Recombination:
    """Pairs with parts of other pairs, learned from pairs of texts with spaces.

    Two patterns of training that differ by some words show what these words add to the target: *saw a cake* and *saw a cake in
    the box*. The addition is made behind other nouns, too, and repeated. It is kept if it predicts the targets of nearly
    all known pairs that it leads to. In targets without numbers, a pair inside another one is exchanged for a third one, which
    may have another pair inside.

    Source: Andreas 2020, section 3, arXiv 1904.09545: fragments that share an environment are interchangeable. The additions
    are differences of two pairs instead, and repeated.

    Attributes:
        has_places: True if numbers in the targets are places of source words.
        num_additions: Number of additions to sources.
        num_outer: Number of pairs with another pair inside.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]):
        """Learn from pairs, in which both sides have spaces between words. Long sources are left out: they have many parts."""
        pairs = [pair for pair in pairs if pair[0].count(" ") < _MOST_WORDS]
        self.reader = PairReader(pairs)
        self._readings = [reading for pair in pairs if (reading := self.reader.read(*pair)) is not None]
        uses: dict[str, set] = defaultdict(set)
        for reading in self._readings:
            before = [_OUTSIDE, *(word if word not in self.reader.translations else 0 for word in reading.words)]
            for place, slot in _find_slots(reading.statements):
                uses[reading.words[place]].add((before[place], slot))
        self._classes = _find_classes(uses)
        most: Counter = Counter()
        # Targets of a pattern, with the words of each pair.
        self._known: dict[Pattern, dict[tuple[Statement, ...], list[tuple[str, ...]]]] = {}
        for reading in self._readings:
            for (place, behind), number in _count_behind(reading.statements).items():
                key = self._classes[reading.words[place]], behind
                most[key] = max(most[key], number)
            targets = self._known.setdefault(self._pattern(reading.words), {})
            targets.setdefault(reading.statements, []).append(reading.words)
        # Tokens behind each word in targets, with their highest number in one target behind a word of its class.
        behind_words = ((word, slot[1]) for word in uses for _, slot in uses[word])
        self._most_behind = Counter({(word, slot): most[self._classes[word], slot] for word, slot in behind_words})
        self._known = {pattern: targets for pattern, targets in self._known.items() if len(targets) <= _MOST_TARGETS}
        self._most_words = _MAX_GROWTH * max((len(reading.words) for reading in self._readings), default=0)
        self._most_tokens = max((reading.num_tokens for reading in self._readings), default=0)
        self.has_places = self.reader.first_number is not None
        self._inner: dict[Pattern, list[Span]] = {}
        self._neighbors: dict[Place, set] = defaultdict(set)
        self._outer: list[Reading] = []
        self._fillers: dict[Place, tuple[set, list[Reading], list[Reading]]] = {}
        if not self.has_places:
            self._learn_exchanges()
        self._pairs_of_neighbors: set = set()
        # For each word without a class, the words that no pattern has less often, as *by* never comes without *was*.
        self._supports: dict[str, set[str]] = {}
        for pattern in self._known:
            self._pairs_of_neighbors.update(pairwise((_OUTSIDE, *pattern, _OUTSIDE)))
            counts = Counter(word for word in pattern if isinstance(word, str))
            for word, number in counts.items():
                least = {other for other, times in counts.items() if times >= number}
                self._supports[word] = self._supports.get(word, least) & least
        self._learn_additions()

    def draw(self, source: str, target: str, random: Random) -> tuple[str, str] | None:
        """Return a pair that is made of the given pair and others. None if no part of it can be changed."""
        changed = reading = self.reader.read(source, target)
        if reading is None:
            return None
        depth = random.randrange(random.randint(1, _MAX_DEPTH))
        if self._outer and random.random() < 0.5:
            outer = reading if self._pattern(reading.words) in self._inner else random.choice(self._outer)
            changed = self._exchange(outer, random, depth)
        if changed is reading or random.random() < 0.5:
            changed = self._add(changed, random)
        if changed is reading and self._outer:
            changed = self._exchange(random.choice(self._outer), random, depth)
        return None if changed is reading else self.reader.write(changed)

    def _pattern(self, words: Iterable[str]) -> Pattern:
        return tuple(self._classes.get(word, word) for word in words)

    def _learn_additions(self) -> None:
        # Additions by the pattern before them, with their texts.
        self._additions: dict[Pattern, dict] = defaultdict(lambda: defaultdict(Counter))
        for pattern, targets in self._known.items():
            inner = {(start, end) for start, end, *_ in self._inner.get(pattern, ())}
            # From the end on: the same words a place later are the same addition.
            later: set[tuple[int, int]] = set()
            for start in reversed(range(len(pattern))):
                for end in range(start + 1, min(start + _LONGEST_ADDITION, len(pattern)) + 1):
                    if {(0, start), (end, len(pattern))} & inner:
                        # The words stand around a pair, which an exchange can replace.
                        continue
                    if (start + 1, end + 1) in later and pattern[start] == pattern[end]:
                        later.add((start, end))
                        continue
                    for longer, sources in targets.items():
                        for shorter in self._known.get(pattern[:start] + pattern[end:], ()):
                            if (addition := self._subtract(pattern, start, end, longer, shorter)) is not None:
                                texts = (words[start:end] for words in sources[:_MAX_TEXTS])
                                self._additions[addition.left][addition].update(texts)
                                later.add((start, end))
        self._evidence = self._check()
        kinds = {addition.kind for addition in self._evidence}
        # Two additions one after the other need no third one.
        kinds -= {kind for kind in kinds if any({kind[:end], kind[end:]} <= kinds for end in range(1, len(kind)))}
        additions = [addition for addition in self._evidence if addition.kind in kinds]
        self.num_additions, self.num_outer = len(additions), len(self._outer)
        learned, self._additions = self._additions, defaultdict(dict)
        for addition in additions:
            self._additions[addition.left][addition] = [*learned[addition.left][addition]][:_MAX_TEXTS]
        # Words with which an addition begins. A second one before them needs evidence.
        self._beginnings = {(addition.left, addition.added[0]) for addition in additions}

    def _subtract(
        self, pattern: Pattern, start: int, end: int, longer: tuple[Statement, ...], shorter: tuple[Statement, ...]
    ) -> Addition | None:
        """Return the addition that makes the longer target of the shorter one, if there is one."""
        shorter = tuple(_shift(statement, start, end - start) for statement in shorter)
        if self.has_places:
            rest = Counter(longer)
            rest.subtract(shorter)
            if min(rest.values()) < 0:
                return None
            added = tuple(statement for statement in longer if rest[statement])
        else:
            [short], [long] = shorter, longer
            length, place = len(long) - len(short), self._place_behind(short, start)
            if length <= 0 or place is None or long[:place] + long[place + length :] != short:
                return None
            added = (long[place : place + length],)
        places = [token.word - start for statement in added for token in statement if isinstance(token, Link)]
        first, last = min(places, default=0), max(places, default=0)
        if not added or first < -_REACH or last >= end - start + _REACH:
            return None
        left = ((_OUTSIDE,) * _REACH + pattern)[start + _REACH - max(_LEFT, -first) : start + _REACH]
        moved = tuple(_shift(statement, _FAR, -start) for statement in added)
        return Addition(left, pattern[start:end], pattern[end : start + last + 1], moved)

    @staticmethod
    def _place_behind(target: Statement, start: int) -> int | None:
        """Return the place behind the one token that follows the word before `start`."""
        link = Link(start - 1, False)
        return 0 if start == 0 else target.index(link) + 1 if target.count(link) == 1 else None

    def _apply(self, addition: Addition, reading: Reading, start: int, words: Pattern) -> Reading | None:
        statements = [_shift(statement, start, len(words)) for statement in reading.statements]
        added = [_shift(statement, _FAR, start) for statement in addition.statements]
        if self.has_places:
            statements = sorted([*statements, *added], key=_first_place)
        else:
            [target] = statements
            if (place := self._place_behind(target, start)) is None:
                return None
            statements = [target[:place] + added[0] + target[place:]]
        return Reading(reading.words[:start] + tuple(words) + reading.words[start:], tuple(statements))

    def _find_places(self, pattern: Pattern) -> Iterator[tuple[Addition, int, str | int]]:
        """Yield additions, each with its place and the word behind it."""
        padded = (_OUTSIDE,) * _REACH + pattern + (_OUTSIDE,)
        for start in range(len(pattern) + 1):
            for length in range(_LEFT, _REACH + 1):
                for addition in self._additions.get(padded[start + _REACH - length : start + _REACH], ()):
                    if pattern[start : start + len(addition.right)] == addition.right:
                        yield addition, start, padded[start + _REACH]

    def _check(self) -> dict[Addition, tuple[set, set]]:
        """Return the additions that predict known pairs, each with the next words where it does and where it does not."""
        counts: dict[Addition, dict] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        for pattern, targets in self._known.items():
            for addition, start, behind in self._find_places(pattern):
                known = self._known.get(pattern[:start] + addition.added + pattern[start:])
                for statements in targets if known else ():
                    if predicted := self._apply(addition, Reading(pattern, statements), start, addition.added):
                        counts[addition][behind][predicted.statements not in known] += 1
        evidence = {}
        for addition, words in counts.items():
            wrong = {word for word, (good, bad) in words.items() if good < _NEARLY_ALL * (good + bad)}
            if right := {word for word, (good, _) in words.items() if good >= _LEAST_CHECKS} - wrong:
                evidence[addition] = right, wrong
        return evidence

    def _add(self, reading: Reading, random: Random) -> Reading:
        """Return the reading with additions, most of them of one kind, each behind the one before."""
        kind, end = None, None
        for _ in range(random.randint(1, _MAX_ADDITIONS)):
            pattern = self._pattern(reading.words)
            choices = [place for place in self._find_places(pattern) if self._is_open(place[0], place[2])]
            if kind is None or random.random() < 0.2:
                kinds = sorted({addition.kind for addition, *_ in choices})
                kind = random.choice(kinds) if kinds else None
            choices = [place for place in choices if place[0].kind == kind]
            if random.random() < 0.7:
                choices = [place for place in choices if place[1] == end] or choices
            if not choices:
                break
            addition, start, _ = random.choice(choices)
            changed = self._apply(addition, reading, start, random.choice(self._additions[addition.left][addition]))
            if changed is not None and len(changed.words) <= self._most_words and self._is_usual(changed, start):
                reading, end = changed, start + len(addition.added)
        return reading

    def _is_open(self, addition: Addition, behind: str | int) -> bool:
        """True if nothing speaks against an addition before the next word."""
        right, wrong = self._evidence[addition]
        # Two words that may stand behind show that others may.
        is_free = len(right) > 1 and behind not in wrong and (addition.left, behind) not in self._beginnings
        return (addition.added[-1], behind) in self._pairs_of_neighbors and (behind in right or is_free)

    def _is_usual(self, reading: Reading, start: int) -> bool:
        """True if the target has behind each word before an addition what training has there, and not more often."""
        symbols = Counter(self._pattern(reading.words))
        if any(symbols[other] < number for word, number in symbols.items() for other in self._supports.get(word, ())):
            return False
        return all(
            number <= self._most_behind[reading.words[place], behind] or not start - _REACH <= place < start
            for (place, behind), number in _count_behind(reading.statements).items()
        )

    def _learn_exchanges(self) -> None:
        """Learn which pairs stand inside others, and between which words."""
        spans_of: dict[Pattern, list[Span]] = {}
        # For each place, pairs of several words inside that share words with another one, less those that do not.
        crossing: Counter = Counter()
        for pattern, targets in self._known.items():
            padded = (_OUTSIDE, *pattern, _OUTSIDE)
            spans_of[pattern] = spans = [
                (start, end, part, (padded[start], padded[end + 1]))
                for start in range(len(pattern))
                for end in range(start + 1, len(pattern) + (start > 0))
                for statements in self._known.get(pattern[start:end], ())
                if (part := _shift(statements[0], _FAR, start))
                and all(self._is_inside(part, target, start, end) for [target] in targets)
            ]
            for start, end, _, place in spans:
                if end > start + 1:
                    crosses = any(start < a < end < b or a < start < b < end for a, b, *_ in spans)
                    crossing[place] += 1 if crosses else -1
        for pattern, spans in spans_of.items():
            # Pairs that cross are not both inside: *look after walk* only seems to be in *look after walk left*.
            inner = [span for span in spans if span[1] == span[0] + 1 or crossing[span[3]] <= 0]
            for start, end, _, place in inner:
                self._neighbors[place].update(pairwise((_OUTSIDE, *pattern[start:end], _OUTSIDE)))
            if inner:
                self._inner[pattern] = inner
                sources = self._known[pattern].items()
                self._outer += [Reading(words, target) for target, texts in sources for words in texts]

    @staticmethod
    def _is_inside(part: Statement, target: Statement, start: int, end: int) -> bool:
        """True if the target has the part, and follows the words from `start` to `end` nowhere else."""
        rest = _replace(target, part, ())
        has_other = any(isinstance(token, Link) and start <= token.word < end for token in rest)
        # A part without links could stand for other words.
        return len(rest) < len(target) and not has_other and any(isinstance(token, Link) for token in part)

    def _exchange(self, reading: Reading, random: Random, depth: int) -> Reading:
        """Return the reading with other pairs in the places of those inside it, and so on within the first of them."""
        inner, free = self._inner.get(self._pattern(reading.words), []), len(reading.words)
        # From the end on, so that the places before it stay.
        for span in sorted(random.sample(inner, len(inner)), key=lambda span: -span[1]):
            start, end, _, place = span
            if end > free or random.random() < _KEPT:
                continue
            _, fillers, outer = self._find_fillers(place)
            choices = outer if depth and outer else fillers
            for _ in range(_TRIES):
                # The longer of two: long ones are few, and lead furthest from training.
                filler = max(random.choices(choices, k=2), key=lambda pair: pair.num_tokens)
                if changed := self._fill(reading, span, filler):
                    filler, depth = (self._exchange(filler, random, depth - 1) if depth else filler), 0
                    reading, free = self._fill(reading, span, filler) or changed, start
                    break
        return reading

    def _find_fillers(self, place: Place) -> tuple[set, list[Reading], list[Reading]]:
        """Return neighbors that may stand at a place, the pairs made of them, and those of the pairs with a pair inside."""
        if place not in self._fillers:
            # The neighbors of all places that share most of theirs with this one may.
            neighbors, all_neighbors = self._neighbors[place], self._neighbors.values()
            like = (other for other in all_neighbors if len(neighbors & other) >= _ALIKE * len(neighbors | other))
            known = set().union(*like)
            fillers = [reading for reading in self._readings if self._neighbors_in(reading) <= known]
            outer = [reading for reading in fillers if self._pattern(reading.words) in self._inner]
            self._fillers[place] = known, fillers, outer
        return self._fillers[place]

    def _neighbors_in(self, reading: Reading) -> set:
        return {*pairwise((_OUTSIDE, *self._pattern(reading.words), _OUTSIDE))}

    def _fill(self, outer: Reading, span: Span, filler: Reading) -> Reading | None:
        """Return a pair with a filler in a span. None unless pairs with all its neighbors stand there in training."""
        start, end, part, place = span
        words = outer.words[:start] + filler.words + outer.words[end:]
        # The part has no links behind `end`, so that it is found after the move, too.
        target = _shift(outer.statements[0], end, len(words) - len(outer.words))
        filled = Reading(words, (_replace(target, part, _shift(filler.statements[0], _FAR, start)),))
        # Training cannot show what is longer than all of it, so there it counts what stands at like places.
        known = self._find_fillers(place)[0] if filled.num_tokens > self._most_tokens else self._neighbors[place]
        return filled if len(words) <= self._most_words and self._neighbors_in(filler) <= known else None


def _replace(target: Statement, part: Statement, new: Statement) -> Statement:
    """Return a target with a part replaced in all its places."""
    tokens, place = [], 0
    while place < len(target):
        is_part = target[place : place + len(part)] == part
        tokens += new if is_part else target[place : place + 1]
        place += len(part) if is_part else 1
    return tuple(tokens)


def _find_slots(statements: Iterable[Statement]) -> Iterator[tuple[int, tuple]]:
    """Yield the place of each word that a token follows, with the two tokens before and behind that token."""
    for statement in statements:
        around = (_OUTSIDE, _OUTSIDE, *_template(statement), _OUTSIDE, _OUTSIDE)
        for place, token in enumerate(statement):
            if isinstance(token, Link) and not token.is_number:
                yield token.word, (around[place : place + 2], around[place + 3 : place + 5])


def _count_behind(statements: Iterable[Statement]) -> Counter:
    return Counter((place, slot[1]) for place, slot in _find_slots(statements))


def _find_classes(uses: dict[str, set]) -> dict[str, int]:
    """Return the number of the class of each word. Words with the same word before them and the same slot are in one class."""
    parents: dict = {}

    def find(node):
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = node = parents[parent]
        return node

    for word, uses_of_word in uses.items():
        for use in uses_of_word:
            # Links and ends alone say nothing.
            if any(isinstance(token, str) and token != _OUTSIDE for side in use[1] for token in side):
                parents[find(word)] = find(use)
    numbers: dict = {}
    return {word: numbers.setdefault(find(word), len(numbers)) for word in uses}

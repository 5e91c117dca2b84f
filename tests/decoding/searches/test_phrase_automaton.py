"""Tests of the phrase automaton: its states agree with a search in the whole text."""

import itertools
import random

import pytest
import torch

from metaphrase.decoding.searches.phrase_automaton import START, PhraseAutomaton

VOCAB = 5
CASES = [
    [[(1,)]],
    [[(1, 2, 1, 3)]],
    [[(1, 1, 2)], [(1, 1)]],
    [[(1, 2, 3)], [(2, 3, 4)], [(3,)]],
    [[(1, 2), (3, 3, 3)], [(2, 1)]],
    [[(1, 2), (START, 4, 2)], [(2, 2)]],
]


def is_met(text, phrases):
    text = (START, *text)
    return any(text[first : first + len(phrase)] == phrase for phrase in phrases for first in range(len(text)))


def follow(automaton, text):
    states = torch.tensor([automaton.start])
    met = torch.zeros(1, automaton.num_constraints, dtype=torch.bool)
    for token in text:
        states, met = automaton.read(states, met, torch.tensor([token]))
    return states, met


def fewest(text, constraints):
    """Return by trial how many more tokens meet all constraints."""
    for count in range(9):
        for more in itertools.product(range(1, VOCAB), repeat=count):
            if all(is_met((*text, *more), phrases) for phrases in constraints):
                return count
    raise AssertionError(f"{constraints} need more tokens behind {text}")


@pytest.mark.parametrize("constraints", CASES, ids=str)
def test_met_is_what_a_text_contains(constraints):
    automaton = PhraseAutomaton(constraints, VOCAB)
    for length in range(7):
        rng = random.Random(length)
        for _ in range(60):
            text = [rng.randrange(VOCAB) for _ in range(length)]
            assert follow(automaton, text)[1][0].tolist() == [is_met(text, phrases) for phrases in constraints]


@pytest.mark.parametrize("constraints", CASES, ids=str)
def test_missing_is_enough_and_can_always_be_lowered(constraints):
    automaton = PhraseAutomaton(constraints, VOCAB)
    for length in range(4):
        for text in itertools.product(range(VOCAB), repeat=length):
            states, met = follow(automaton, text)
            missing = automaton.num_missing(states, met).item()
            assert fewest(text, constraints) <= missing <= automaton.num_tokens
            assert (missing == 0) == bool(met.all())
            if missing:
                behind = automaton.read(states, met[:, None], automaton.alphabet)
                assert automaton.num_missing(*behind).min() < missing


@pytest.mark.parametrize("constraints", CASES, ids=str)
def test_each_phrase_leads_on_token_by_token(constraints):
    automaton = PhraseAutomaton(constraints, VOCAB)
    for phrase in (phrase for phrases in constraints for phrase in phrases if START not in phrase):
        values = [automaton.progress(*follow(automaton, phrase[:count])).item() for count in range(len(phrase) + 1)]
        assert values[0] == 0 and values == sorted(set(values)) and values[-1] <= automaton.most_progress

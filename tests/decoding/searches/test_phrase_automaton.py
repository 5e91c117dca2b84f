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


@pytest.mark.parametrize("constraints", CASES, ids=str)
def test_met_is_what_a_text_contains(constraints):
    automaton = PhraseAutomaton(constraints, VOCAB)
    for length in range(7):
        rng = random.Random(length)
        for _ in range(60):
            text = [rng.randrange(VOCAB) for _ in range(length)]
            assert follow(automaton, text)[1][0].tolist() == [is_met(text, phrases) for phrases in constraints]


@pytest.mark.parametrize("constraints", CASES, ids=str)
def test_some_token_always_leads_on(constraints):
    automaton = PhraseAutomaton(constraints, VOCAB)
    for length in range(5):
        for text in itertools.product(range(VOCAB), repeat=length):
            states, met = follow(automaton, text)
            progress = automaton.progress(states, met).item()
            assert (progress == automaton.most_progress) == bool(met.all())
            if not met.all():
                behind = automaton.read(states, met[:, None], automaton.alphabet)
                assert automaton.progress(*behind).max() > progress

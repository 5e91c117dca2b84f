"""Commands: an English command such as *jump around left twice* becomes a sequence of actions.

The task is known as SCAN (Lake and Baroni 2018, arXiv 1711.00350), whose grammar this is. `test` is like training.
`test_systematic` needs verb phrases that are held out: training shows their verbs and directions in all other phrases.
"""

import random

VERBS = ("walk", "look", "run", "jump")
DIRECTIONS = ("left", "right")
REPETITIONS = {"": 1, " twice": 2, " thrice": 3}
HELD_OUT = ("jump around left", "run opposite right", "look around right")


def make_phrases() -> dict[str, list[str]]:
    """Return all verb phrases with their actions."""
    phrases = {verb: [f"I_{verb.upper()}"] for verb in VERBS}
    for verb in (*VERBS, "turn"):
        action = phrases.get(verb, [])
        for direction in DIRECTIONS:
            turn = [f"I_TURN_{direction.upper()}"]
            phrases[f"{verb} {direction}"] = turn + action
            phrases[f"{verb} opposite {direction}"] = 2 * turn + action
            phrases[f"{verb} around {direction}"] = 4 * (turn + action)
    return phrases


def make_commands() -> list[tuple[str, str]]:
    """Return all 20,910 commands with their actions."""
    simple = {
        phrase + word: number * actions
        for phrase, actions in make_phrases().items()
        for word, number in REPETITIONS.items()
    }
    pairs = list(simple.items())
    for first, first_actions in simple.items():
        for second, second_actions in simple.items():
            pairs.append((f"{first} and {second}", first_actions + second_actions))
            pairs.append((f"{first} after {second}", second_actions + first_actions))
    return [(command, " ".join(actions)) for command, actions in pairs]


def make_splits(seed: int = 1) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split."""
    pairs = make_commands()
    random.Random(seed).shuffle(pairs)
    usual, held_out = [], []
    for pair in pairs:
        (held_out if any(phrase in pair[0] for phrase in HELD_OUT) else usual).append(pair)
    return {
        "train": usual[1500:],
        "validation": usual[:500],
        "test": usual[500:1500],
        "test_systematic": held_out[:1000],
    }

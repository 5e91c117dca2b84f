"""Commands: an English command such as *jump around left twice* becomes a sequence of actions.

The task is known as SCAN (Lake and Baroni 2018, arXiv 1711.00350), whose grammar this is. `test` is like training.
`test_systematic` has what training lacks:

- `commands`: verb phrases whose verbs and directions training shows in all other phrases,
- `commands_length`: all commands of 24 to 48 actions, where training has up to 22 (the length split of SCAN),
- `commands_primitive`: all commands with *jump* but *jump* alone, which is a tenth of training (addprim_jump of SCAN).
"""

import random
from collections.abc import Callable

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


def has_held_out_phrase(command: str, actions: str) -> bool:
    return any(phrase in command for phrase in HELD_OUT)


def make_splits(
    is_held_out: Callable[[str, str], bool] = has_held_out_phrase, num_systematic: int | None = 1000, seed: int = 1
) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split.

    Args:
        is_held_out: Whether a command with its actions is one for `test_systematic`.
        num_systematic: Number of such commands. All if None.
        seed: Seed of all choices.
    """
    pairs = make_commands()
    random.Random(seed).shuffle(pairs)
    usual, held_out = [], []
    for pair in pairs:
        (held_out if is_held_out(*pair) else usual).append(pair)
    return {
        "train": usual[1500:],
        "validation": usual[:500],
        "test": usual[500:1500],
        "test_systematic": held_out[:num_systematic],
    }


def make_length_splits() -> dict[str, list[tuple[str, str]]]:
    return make_splits(lambda _, actions: len(actions.split()) > 22, num_systematic=None)


def make_primitive_splits() -> dict[str, list[tuple[str, str]]]:
    splits = make_splits(lambda command, _: "jump" in command, num_systematic=None)
    jump = ("jump", "I_JUMP")
    splits["test_systematic"].remove(jump)
    splits["train"] += [jump] * (len(splits["train"]) // 9)
    return splits

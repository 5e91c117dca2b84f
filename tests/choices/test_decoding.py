import time
from types import SimpleNamespace

import pytest

from metaphrase.choices.completion import choose_decoding
from metaphrase.evaluation.evaluate import TaskScores

GREEDY, BEAMS = {"num_beams": 1}, {"num_beams": 4, "length_penalty": 1.0}
SHORT, LONG = {**BEAMS, "length_penalty": 0.6}, {**BEAMS, "length_penalty": 1.5}
EARLY = {"early_stopping": True}


class Writer:
    """A generator that writes `right` wrong-free texts of ten, by setting."""

    def __init__(self, right):
        self.right, self.asked = right, []

    def generate(self, sources, show_progress, **setting):
        self.asked.append(setting)
        right = self.right[len(self.asked) - 1]
        return [source if row < right else "no" for row, source in enumerate(sources)]


SOURCES = [f"the number {row} of ten sentences" for row in range(10)]


def sample_of(metric):
    return SimpleNamespace(sources=SOURCES, references=SOURCES, scores=TaskScores([metric]))


@pytest.mark.parametrize(
    ("metric", "right", "chosen", "tried"),
    [
        ("bleu", [5, 6, 8, 7, 8], SHORT | EARLY, 5),
        ("bleu", [5, 6, 6, 9, 8], LONG, 5),
        ("bleu", [5, 6, 6, 6, 5], BEAMS, 5),
        ("bleu", [5, 6, 6, 6, 7], BEAMS | EARLY, 5),
        # Beams that bring nothing only cost time.
        ("bleu", [5, 5], GREEDY, 2),
        ("exact_match", [5, 6, 6], BEAMS | EARLY, 3),
        ("wer", [6, 5], GREEDY, 2),
        ("wer", [5, 6, 5], BEAMS, 3),
    ],
)
def test_the_best_setting_is_chosen(metric, right, chosen, tried):
    writer = Writer(right)
    values, reason = choose_decoding(writer, sample_of(metric))
    assert values == chosen and len(writer.asked) == tried
    assert f"{metric} of 10 validation pairs" in reason and "with greedy search" in reason


def test_time_for_the_final_scores_remains(monkeypatch):
    clock, writer = [1000.0], Writer([5, 6, 7, 8])

    def generate(*args, num_beams, **options):
        clock[0] += 5 if num_beams == 1 else 10
        return writer.generate(*args, num_beams=num_beams, **options)

    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    # The scores of 20 pairs take twice the time of 10: two searches fit, and all would end at 1045 with a third.
    assert choose_decoding(SimpleNamespace(generate=generate), sample_of("bleu"), 1040.0, 20)[0] == BEAMS
    assert writer.asked == [GREEDY, BEAMS]

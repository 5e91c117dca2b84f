"""Precision: bfloat16 on a processor that is slow at it."""

import logging
import math

import pytest

from metaphrase.training import cpu_setup as precision


def test_speed_is_that_of_this_processor():
    speed = precision.speed_of_bfloat16()
    assert math.isfinite(speed) and speed > 0


@pytest.mark.parametrize(("speed", "says"), [(0.52, ["0.52"]), (0.95, []), (4.0, [])])
def test_slow_bfloat16_is_told(speed, says, monkeypatch, caplog):
    monkeypatch.setattr(precision, "speed_of_bfloat16", lambda: speed)
    with caplog.at_level(logging.WARNING):
        precision.warn_of_slow_bfloat16()
    assert [record.args[0] for record in caplog.records] == [float(text) for text in says]


@pytest.mark.parametrize(("part", "expected"), [(1, 0.5), (4, 2.0)])
def test_trial_divides_the_time_of_float32_by_that_of_bfloat16(part, expected, monkeypatch):
    """With a clock that goes on by 2 ms for a float32 product, and by some of it for one in bfloat16."""
    ticks = [0.002, 0.004 / part] * precision._ROUNDS
    times = [0.0]
    for tick in ticks:
        times += [times[-1] + 1.0, times[-1] + 1.0 + tick]
    clock = iter(times[1:])
    monkeypatch.setattr(precision.time, "perf_counter", lambda: next(clock))
    assert precision.speed_of_bfloat16() == pytest.approx(expected)

"""Test of the hours that the benchmark computes from its rates. Its modules import each other as scripts do."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def throughput(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import throughput

    return throughput


def test_the_page_has_the_tables_of_its_report(throughput):
    report = json.loads((FOLDER / "results" / "throughput.json").read_text(encoding="utf-8"))
    page = throughput.PAGE.read_text(encoding="utf-8")
    assert throughput.fill(page, report) == page


def test_hours_follow_from_rates_cores_and_operations(throughput):
    report = {
        "pairs_per_second": {"filter": 1000, "scan": 1e6, "read": 1e5, "tokenize": 1e4, "stream": 2e4, "plan": 1e5},
        "tokens_per_pair": {"source": 30, "target": 20},
        "training": {
            "a": {"tokens_per_second": 500, "parameters_without_embeddings": {"encoder": 2e6, "decoder": 3e6}}
        },
        "decoding": {"a": {"sentences_per_second": {"1 beams": {"torch": 5, "ctranslate2": 10}}}},
    }
    one, eight = (throughput.hours_of_steps(report, machines) for machines in (1, 8))
    assert one["tokenize into the cache"] == eight["tokenize into the cache"] == pytest.approx(1e5 / 3600)
    assert one["filter, files split before"] == pytest.approx(1e6 / 64 / 3600)
    assert eight["filter, `--shard`"] == pytest.approx((1e6 / 512 + 1500) / 3600)
    assert one["train a, CPU, an epoch"] == pytest.approx(5e10 / 500 / 64 / 3600)
    # 6 operations for each token and weight of its stack: 30 * 2 + 20 * 3 million weights read by a pair.
    assert eight["train a, GPU, an epoch, computed"] == pytest.approx(1e9 * 6 * 120e6 / (0.4 * 989.5e12) / 64 / 3600)
    assert (
        eight["decode by a, CPU, greedy"]
        == pytest.approx(one["decode by a, CPU, greedy"] / 8)
        == pytest.approx(1e8 / 512 / 3600)
    )

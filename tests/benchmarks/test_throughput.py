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

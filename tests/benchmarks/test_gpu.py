"""Tests of the benchmark for a GPU, and of the page of hours that another computes from its rates."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import flops_of_pairs
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration

ROOT = Path(__file__).parents[2]


def test_the_smallest_parts_run_on_a_cpu_and_only_once(tmp_path):
    words = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--device", "cpu", "--output", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    assert reports.keys() == {"train_tiny", "generate_tiny"}
    assert reports["train_tiny"]["results"]["metaphrase"]["teraflops"] > 0
    generated = reports["generate_tiny"]
    assert generated["same_in_float32"] == {"greedy": generated["of"], "4 beams": generated["of"]}
    assert "| transformer-tiny, greedy, batch 1 | metaphrase |" in (tmp_path / "gpu.md").read_text(encoding="utf-8")
    # A part whose file is there is left out.
    again = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert not again.stdout


@pytest.mark.parametrize("preset", ["transformer-tiny", "t5-small"])
def test_operations_are_those_that_torch_counts(preset):
    config = MetaphraseConfig.from_preset(preset, vocab_size=1000)
    model = MetaphraseForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    source, target = torch.full((1, 40), 5), torch.full((1, 60), 5)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=source, decoder_input_ids=target).logits.sum().backward()
    ours = flops_of_pairs(config, np.array([[40, 60]]))
    # Causal attention computes half of its scores for nothing.
    causal = (
        config.decoder_layers * 12 * config.stack_sizes("decoder").head_dim * config.decoder_attention_heads * 60**2 / 2
    )
    assert ours + causal == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_the_page_of_hours_has_the_tables_of_its_report(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import throughput

    report = json.loads((ROOT / "benchmarks" / "results" / "throughput.json").read_text(encoding="utf-8"))
    page = throughput.PAGE.read_text(encoding="utf-8")
    assert throughput.fill(page, report) == page

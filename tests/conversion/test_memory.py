"""Tests of a conversion's memory: one written file at a time, for any size of the checkpoint."""

import subprocess
import sys

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

PROGRAM = """
import sys
from metaphrase.conversion import convert
from metaphrase.conversion.folders import *  # all that a conversion imports

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

before = peak()
convert(sys.argv[1], sys.argv[2], max_shard_size="20MB", **dict(word.split("=") for word in sys.argv[3:]))
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.slow
def test_peak_is_within_one_and_a_half_checkpoints(tmp_path):
    config = T5Config(d_model=512, d_kv=64, d_ff=1024, num_layers=4, num_heads=8, vocab_size=20000)
    with torch.device("meta"):
        theirs = T5ForConditionalGeneration(config)
    theirs.to_empty(device="cpu").tie_weights()
    for weight in theirs.parameters():
        # Memory that was not written may hold NaN, which a conversion refuses.
        torch.nn.init.ones_(weight)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20MB")
    size = sum(path.stat().st_size for path in (tmp_path / "theirs").glob("*.safetensors"))
    assert size > 100 * 10**6
    for words in ((tmp_path / "theirs", tmp_path / "ours"), (tmp_path / "ours", tmp_path / "again", "to=t5")):
        command = [sys.executable, "-c", PROGRAM, *map(str, words)]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
        # The mapped files count, though the system could take their pages back.
        assert peak < 1.5 * size

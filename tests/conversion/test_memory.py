"""Tests of a conversion's memory: one written file at a time, for any size of the checkpoint."""

import contextlib
import json
import math
import subprocess
import sys

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from metaphrase.conversion.families import FAMILIES, Weights
from metaphrase.conversion.folders import DEFAULT_SHARD_SIZE, plan_ours, skeleton, stored_names
from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.storage import weight_files
from metaphrase.storage.weight_files import WeightFiles, write_weights

T5_3B = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "decoder_start_token_id": 0}
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


def write_holes(path, shapes):
    """Write a sparse safetensors file of zeros, and return its size."""
    header, place = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    return place


@pytest.mark.slow
def test_t5_3b_is_planned_in_parts(tmp_path, monkeypatch):
    theirs = skeleton(T5ForConditionalGeneration, T5Config(**T5_3B))
    shapes = {name: tuple(theirs.state_dict()[name].shape) for name in stored_names(theirs)}
    total = write_holes(tmp_path / "model.safetensors", shapes)
    assert total > 11 * 10**9
    family = FAMILIES["t5"]
    with contextlib.ExitStack() as files:
        weights = Weights(WeightFiles(tmp_path, files), family.prefix)
        ours = skeleton(MetaphraseForConditionalGeneration, family.read_config(theirs.config, weights))
        planned = plan_ours(family, ours, weights)
        sizes = []
        monkeypatch.setattr(
            weight_files,
            "save_file",
            lambda shard, *_, **__: sizes.append(sum(tensor.nbytes for tensor in shard.values())),
        )
        write_weights(tmp_path, planned, 5 * 10**9)
    assert DEFAULT_SHARD_SIZE == "5GB"
    assert sum(sizes) == total and max(sizes) <= 5 * 10**9


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

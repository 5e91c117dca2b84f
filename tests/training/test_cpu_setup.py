"""Setup of a CPU: the settings reach the C library, pages that were freed are used again, and slow bfloat16 is told."""

import logging
import os
import platform
import subprocess
import sys

import pytest
import torch

from metaphrase.training import cpu_setup

CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# Page faults of the second half of ten large temporaries; those below 32 MiB glibc keeps by itself.
PROGRAM = """
import resource, sys
import numpy as np
from metaphrase.training.cpu_setup import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for turn in range(10):
    if turn == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(5_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

# Twice the same 100 shapes: how many kernels were made.
KERNELS = """
import sys, torch
from metaphrase.training.cpu_setup import keep_few_kernels
if sys.argv[1] == "few":
    keep_few_kernels()
weight = torch.ones(64, 64, dtype=torch.bfloat16)
for rows in 2 * [*range(100, 200)]:
    torch.nn.functional.linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
"""


def run_python(program, mode, **options):
    return subprocess.run([sys.executable, "-c", program, mode], capture_output=True, check=True, text=True, **options)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_pages_are_not_faulted_in_again():
    faults = {mode: int(run_python(PROGRAM, mode).stdout) for mode in ("kept", "given back")}
    assert faults["kept"] * 4 < faults["given back"], faults


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no products in bfloat16"
)
def test_kernels_of_few_shapes_are_kept():
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    environment["ONEDNN_VERBOSE"] = "profile_create"

    def made(mode):
        return run_python(KERNELS, mode, env=environment).stdout.count("create:cache_miss")

    # Kept, they are made once; with 64 kept of 100, each is gone when its turn comes again.
    kept, few = made("kept"), made("few")
    assert kept >= 100 and few >= kept + 100, (kept, few)


@pytest.mark.parametrize(("speed", "says"), [(0.52, ["0.52"]), (0.95, []), (4.0, [])])
def test_slow_bfloat16_is_told(speed, says, monkeypatch, caplog):
    monkeypatch.setattr(cpu_setup, "speed_of_bfloat16", lambda: speed)
    with caplog.at_level(logging.WARNING):
        cpu_setup.warn_of_slow_bfloat16()
    assert [record.args[0] for record in caplog.records] == [float(text) for text in says]

import os
import platform
import subprocess
import sys

import pytest
import torch

from metaphrase.ops import cpu_setup

# Page faults of the second half of ten large temporaries, before and after; those below 32 MiB glibc keeps by itself.
PROGRAM = """
import resource
import numpy as np
from metaphrase.ops.cpu_setup import keep_freed_memory

def faults():
    for turn in range(10):
        if turn == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(5_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
keep_freed_memory()
print(before, faults())
"""

# Twice the same 100 shapes: each kernel of 64 that are kept is gone when its turn comes again.
KERNELS = """
import torch
from metaphrase.ops.cpu_setup import keep_few_kernels
keep_few_kernels()
weight = torch.ones(64, 64, dtype=torch.bfloat16)
for rows in 2 * [*range(100, 200)]:
    torch.nn.functional.linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
"""


def run_python(program, **options):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, **options).stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_pages_are_not_faulted_in_again():
    before, after = map(int, run_python(PROGRAM).split())
    assert after * 4 < before


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no products in bfloat16")
def test_kernels_of_few_shapes_are_kept():
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    made = run_python(KERNELS, env=environment | {"ONEDNN_VERBOSE": "profile_create"}).count("create:cache_miss")
    assert made >= 200


@pytest.mark.parametrize(("speed", "is_slow"), [(0.52, True), (0.95, False), (4.0, False)])
def test_slow_bfloat16_is_told(speed, is_slow, monkeypatch):
    monkeypatch.setattr(cpu_setup, "speed_of_bfloat16", lambda: speed)
    alerts = cpu_setup.slow_bfloat16_alerts()
    assert [f"{speed} of its speed in float32" in alert for alert in alerts] == [True] * is_slow

"""Memory: the settings reach the C library, and pages that were freed are used again."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from metaphrase.training import cpu_setup as memory

CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
IS_GLIBC = platform.libc_ver()[0] == "glibc"
# Page faults of the second half of ten large temporaries; those below 32 MiB glibc keeps by itself.
PROGRAM = """
import resource, sys
import numpy as np
from metaphrase.training.cpu_setup import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory() is True
for turn in range(10):
    if turn == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(5_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

# By how much the heap shrinks when so many GiB, of which nothing was ever written, are freed.
SHRINKING = """
import ctypes, sys
import numpy as np
from metaphrase.training.cpu_setup import keep_freed_memory
assert keep_freed_memory() is True
place = ctypes.CDLL(None).sbrk
place.restype, place.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
whole = np.empty(int(sys.argv[1]) * 2**30, dtype=np.uint8)
before = place(0)
del whole
print(before - place(0))
"""

# Twice the same 100 shapes: how many kernels were made.
KERNELS = """
import sys, torch
from metaphrase.training.cpu_setup import keep_few_kernels
if sys.argv[1] == "few":
    assert keep_few_kernels() is True
weight = torch.ones(64, 64, dtype=torch.bfloat16)
for rows in 2 * [*range(100, 200)]:
    torch.nn.functional.linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
"""


def use_library(monkeypatch, returned):
    calls = []
    library = SimpleNamespace(mallopt=lambda *arguments: calls.append(arguments) or returned)
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    return calls


def test_settings_are_those_of_malloc_h(monkeypatch):
    calls = use_library(monkeypatch, 1)
    assert memory.keep_freed_memory() is True
    # M_MMAP_MAX 0: everything from the heap; M_TRIM_THRESHOLD: the heap does not shrink; M_TOP_PAD: it grows in large steps.
    assert dict(calls).keys() == {-4, -1, -2} and dict(calls)[-4] == 0
    assert dict(calls)[-1] == -1 and dict(calls)[-2] >= 2**20


def test_a_setting_that_is_refused_is_reported(monkeypatch):
    use_library(monkeypatch, 0)
    assert memory.keep_freed_memory() is False


def test_nothing_happens_without_glibc(monkeypatch):
    calls = use_library(monkeypatch, 1)
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    assert memory.keep_freed_memory() is False and calls == []


@pytest.mark.skipif(not IS_GLIBC, reason="only glibc has these settings")
def test_freed_pages_are_not_faulted_in_again():
    faults = {
        mode: int(
            subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, check=True, text=True).stdout
        )
        for mode in ("kept", "given back")
    }
    assert faults["kept"] * 4 < faults["given back"], faults


@pytest.mark.skipif(not IS_GLIBC, reason="only glibc has these settings")
def test_a_heap_of_any_size_is_kept():
    command = [sys.executable, "-c", SHRINKING, "3"]
    assert int(subprocess.run(command, capture_output=True, check=True, text=True).stdout) == 0


def test_settings_of_the_environment_stay_in_force(monkeypatch):
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(CACHES[1], "500")
    assert memory.keep_few_kernels() is False
    assert (os.environ[CACHES[0]], os.environ[CACHES[1]]) == ("64", "500")


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no products in bfloat16"
)
def test_kernels_of_few_shapes_are_kept():
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    environment["ONEDNN_VERBOSE"] = "profile_create"

    def made(mode):
        command = [sys.executable, "-c", KERNELS, mode]
        output = subprocess.run(command, capture_output=True, check=True, text=True, env=environment).stdout
        return output.count("create:cache_miss")

    # Kept, they are made once; with 64 kept of 100, each is gone when its turn comes again.
    kept, few = made("kept"), made("few")
    assert kept >= 100 and few >= kept + 100, (kept, few)

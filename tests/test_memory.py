"""Memory: the settings reach the C library, and pages that were freed are used again."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from metaphrase.training import memory

IS_GLIBC = platform.libc_ver()[0] == "glibc"
# Page faults of the second half of ten large temporaries; those below 32 MiB glibc keeps by itself.
PROGRAM = """
import resource, sys
import numpy as np
from metaphrase.training.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory() is True
for turn in range(10):
    if turn == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(5_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
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
    assert dict(calls)[-1] >= 2**30 and dict(calls)[-2] >= 2**20


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

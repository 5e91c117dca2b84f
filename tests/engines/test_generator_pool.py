"""Generator pool: what one generator writes, by several processes, which end with the pool and with whoever made it."""

import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_generator import SOURCES, save_generator, tiny_generator

from metaphrase.engines import generator_pool
from metaphrase.engines.generator_pool import spread_devices
from metaphrase.inference import GeneratorPool
from metaphrase.inference.batches import TooLongError
from metaphrase.inference.generator import Chunk

LIMIT_SECONDS = 60
LINES = [f"{source} {number}" for number in range(5) for source in (*SOURCES, "")]


@pytest.fixture(scope="module")
def generator():
    return tiny_generator(kind="byte")


@pytest.fixture(scope="module")
def folder(generator, tmp_path_factory):
    return str(save_generator(generator, tmp_path_factory.mktemp("pool") / "model"))


@pytest.fixture(scope="module")
def pool(folder):
    with GeneratorPool(folder, num_processes=2, device="cpu", assistant_model=None) as pool:
        yield pool


def processes_of(pool):
    return list(pool._executor._processes)


def is_running(process):
    try:
        # One that has ended and was not waited for yet is a zombie.
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 3.0, "seed": 5, "return_scores": False},
        {"must_contain": ["H"], "num_beams": 3, "max_new_tokens": 12},
        {"risk": {"num_candidates": 4, "utility": "bleu"}, "seed": 2, "return_scores": True},
    ],
    ids=str,
)
def test_it_writes_what_one_generator_writes(options, pool, generator):
    expected = list(generator.generate_stream(LINES, chunk_size=4, **options))
    assert len(expected) == len(LINES)
    assert len(set(processes_of(pool))) == pool.num_processes == 2 and os.getpid() not in processes_of(pool)
    assert list(pool.generate_stream(LINES, chunk_size=4, **options)) == expected
    assert pool.num_targets(num_beams=3, num_return_sequences=2) == 2
    # A stream that was left is taken up.
    rest = pool.generate_stream(LINES[8:], chunk_size=4, first_chunk=2, **options)
    assert list(rest) == expected[8:]


def test_what_generators_count_is_added_up(pool):
    before = pool.num_unfinished
    list(pool.generate_stream(SOURCES * 2, chunk_size=2, max_new_tokens=2))
    assert pool.num_unfinished - before == 10


def test_mistakes_come_with_their_words_and_end_nothing(pool, generator):
    with pytest.raises(ValueError, match="`num_beams` must be at least 2"):
        list(pool.generate_stream(SOURCES, num_beams=1, must_contain=["Hund"]))
    with pytest.raises(TooLongError, match=r"than the model has positions, .* in number 5 "):
        list(pool.generate_stream([*SOURCES[:4], "the dog " * 50], chunk_size=2, max_new_tokens=2))

    def lines():
        yield from SOURCES[:4]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(pool.generate_stream(lines(), chunk_size=2))
    rows = pool.generate_stream(SOURCES, chunk_size=2)
    assert [row[0].text for row in rows] == generator.generate(SOURCES)


def test_no_more_is_read_than_a_chunk_for_each_and_one(pool):
    read = []

    def lines():
        for number in itertools.count():
            read.append(number)
            yield f"the cat {number}"

    stream = pool.generate_stream(lines(), chunk_size=3)
    next(stream)
    time.sleep(0.5)
    # One is here, one for each process is there or done.
    assert len(read) <= 3 * (1 + pool.num_processes)
    stream.close()


@pytest.mark.slow
def test_processes_end_in_the_middle_of_their_work_and_a_closed_pool_says_so(folder):
    long = {"max_new_tokens": 100_000, "eos_token_id": -1, "num_beams": 1}
    with GeneratorPool(folder, num_processes=1, device="cpu", assistant_model=folder) as pool:
        # With a draft model that is the model itself, all is accepted.
        texts = [scored.text for [scored] in pool.generate_stream(SOURCES, num_beams=1, num_assistant_tokens=2)]
        assert texts == tiny_generator(kind="byte").generate(SOURCES, num_beams=1)
        assert pool.num_drafted == pool.num_accepted > 0
        stream = pool.generate_stream(LINES, chunk_size=2, max_new_tokens=1)
        next(stream)
        [process] = processes_of(pool)
        options = {"seed": None, "return_scores": False, "risk": None, "split_sentences": False, **long}
        future = pool._executor.submit(generator_pool._generate, Chunk(0, 0, SOURCES), options)
        while not future.running():
            assert not future.done()
            time.sleep(0.01)
        started = time.monotonic()
    assert time.monotonic() - started < LIMIT_SECONDS / 2 and not is_running(process)
    with pytest.raises((RuntimeError, ChildProcessError)):
        pool.num_targets()


# Arguments: the folder of a model. Says which processes it has, and waits.
PARENT = """
import sys
from metaphrase.inference import GeneratorPool

if __name__ == "__main__":
    pool = GeneratorPool(sys.argv[1], num_processes=1, device="cpu")
    print(*pool._executor._processes, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_do_not_outlive_a_killed_parent(folder, tmp_path):
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "parent.py"), folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        processes = [int(word) for word in parent.stdout.readline().split()]
        assert len(processes) == 1 and all(map(is_running, processes))
        parent.kill()
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("device", "count", "num_devices", "expected"),
    [
        (None, 4, 3, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
        ("cuda", 2, 3, ["cuda:0", "cuda:1"]),
        ("cuda:2", 2, 3, ["cuda:2", "cuda:2"]),
        ("cpu", 3, 3, ["cpu"] * 3),
        (None, 2, 0, [None, None]),
    ],
)
def test_processes_take_the_accelerators_in_turn(device, count, num_devices, expected, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    assert spread_devices(device, count) == expected


def test_a_death_is_named(pool):
    stream = pool.generate_stream(itertools.cycle(SOURCES), chunk_size=5)
    next(stream)
    os.kill(processes_of(pool)[0], signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="A process of the generator pool died"):
        list(stream)


@pytest.mark.parametrize("num_targets", [1, 3])
def test_documents_of_datatrove_keep_their_order_and_get_their_targets(folder, generator, num_targets):
    documents = pytest.importorskip("datatrove.data").Document
    documents = [documents(text, str(number)) for number, text in enumerate([*SOURCES, ""])]
    options = {"num_beams": 3, "num_return_sequences": num_targets}
    step = importlib.import_module("metaphrase.engines.datatrove").GenerateStep
    step = step(folder, key="de", chunk_size=2, loading={"device": "cpu"}, **options)
    results = list(step(iter(documents)))
    assert results == documents and step.stats["documents"].total == 6
    rows = generator.generate_n_best([*SOURCES, ""], return_scores=False, **options)
    expected = [[item.text for item in row] if num_targets > 1 else row[0].text for row in rows]
    assert [document.metadata["de"] for document in results] == expected

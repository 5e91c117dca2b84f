"""Streams: errors in order, random numbers by chunk, no hanging, bounded memory."""

import gc
import subprocess
import sys
import tracemalloc

import pytest
import torch
from tiny_generator import SOURCES, save_generator, tiny_generator

from metaphrase.inference.generator import read_chunks

LIMIT_SECONDS = 60


@pytest.fixture(scope="module")
def generator():
    return tiny_generator()


@pytest.mark.parametrize("place", ["reader", "text", "tokenizer"])
def test_errors_come_after_the_chunks_before_them(generator, place, monkeypatch):
    def lines():
        yield from SOURCES[:4]
        if place == "reader":
            raise OSError("the disk is gone")
        yield 7 if place == "text" else "unreadable"

    def encode(texts):
        if "unreadable" in texts:
            raise RuntimeError("no tokens")
        return type(generator).encode_uncut(generator, texts)

    monkeypatch.setattr(generator, "encode_uncut", encode)
    expected = {"reader": OSError, "text": ValueError, "tokenizer": RuntimeError}[place]
    results = []
    with pytest.raises(expected):
        for candidates in generator.generate_stream(lines(), chunk_size=2):
            results.append(candidates[0].text)
    assert results == generator.generate(SOURCES[:4])


def test_chunks_must_be_positive(generator):
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, got 0"):
        list(generator.generate_stream(SOURCES, chunk_size=0))
    assert [chunk.texts for chunk in read_chunks("abcde", 2)] == [["a", "b"], ["c", "d"], ["e"]]


def test_random_numbers_belong_to_the_chunk(generator):
    options, lines = {"chunk_size": 2, "do_sample": True, "temperature": 3.0}, SOURCES * 2
    whole = list(generator.generate_stream(lines, seed=3, **options))
    torch.manual_seed(0)
    assert list(generator.generate_stream(lines[6:], seed=3, first_chunk=3, **options)) == whole[6:]
    for seed, first_chunk in ((3, 2), (4, 3)):
        others = generator.generate_stream(lines[6:], seed=seed, first_chunk=first_chunk, **options)
        assert list(others) != whole[6:]
    torch.manual_seed(3)
    assert list(generator.generate_stream(lines[:2], **options)) == whole[:2]


def test_memory_does_not_grow_with_the_stream():
    lines, in_use = (f"{SOURCES[number % 5]} {number}" for number in range(2048)), []
    stream = tiny_generator(batch_size=128).generate_stream(lines, chunk_size=128, max_new_tokens=1)
    tracemalloc.start()
    try:
        for count, _ in enumerate(stream, start=1):
            if count % 512 == 0:
                # Without it, how long cycles wait to be freed would count, which the machine's load decides.
                gc.collect()
                in_use.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    first, *later = in_use
    # To hold the results alone would take twice as much: a candidate and its list are more than 200 bytes.
    assert len(later) == 3 and max(later) - min(later) < 1024 * 100, (first, later)


@pytest.mark.slow
def test_a_reader_of_the_output_that_has_seen_enough_ends_the_command(tmp_path):
    """The process ends although standard input stays open, and says nothing."""
    model = save_generator(tiny_generator(kind="byte"), tmp_path / "model")
    command = [sys.executable, "-m", "metaphrase.scripts", "generate", str(model), "--device", "cpu", "--window", "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process.stdin.write(b"the cat\n")
        process.stdin.flush()
        # A line comes back before the next one is there.
        assert process.stdout.readline().endswith(b"\n")
        process.stdout.close()
        process.stdin.write(b"the dog\n")
        process.stdin.flush()
        code = process.wait(LIMIT_SECONDS)
        assert code == 0 and b"Fatal" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()

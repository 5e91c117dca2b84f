"""The generator: texts in, as many texts out, in order."""

import contextlib
import gc
import subprocess
import sys
import tracemalloc

import pytest
import torch
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator
from transformers import GenerationMixin

from metaphrase.evaluation.evaluate import evaluate_generator
from metaphrase.inference import Generator, ScoredText, batches
from metaphrase.inference import batches as module
from metaphrase.inference.generator import read_chunks
from metaphrase.texts import documents
from metaphrase.texts.documents import find_loop

WHITE = ["", " ", "\t", "\u2028", "\x85 \u00a0", "\r"]


def test_order_and_number_are_kept_and_batched_is_alone(generator):
    texts = [SOURCES[0], "", *SOURCES, SOURCES[0]]
    targets = generator.generate(texts)
    assert len(targets) == len(texts)
    assert targets == [generator.generate([text])[0] for text in texts]
    assert targets[1] == "" and targets[0] == targets[2] == targets[-1] and len(set(targets)) > 3
    separate = tiny_generator(joint=False)
    ids = separate.model.generate(torch.tensor(separate.encode(SOURCES[:1])))
    assert separate.generate(SOURCES[:1]) == separate.tokenizers.decode_targets(ids[:, 1:])


def test_white_space_gives_empty_texts_without_asking_the_model(generator, monkeypatch):
    seen, whole = [], module.decode
    monkeypatch.setattr(
        module,
        "decode",
        lambda model, ids, *args, **rest: seen.extend(ids) or whole(model, ids, *args, **rest),
    )
    targets = generator.generate([*WHITE, SOURCES[0], *WHITE])
    assert targets[: len(WHITE)] == targets[-len(WHITE) :] == [""] * len(WHITE)
    assert targets[len(WHITE)] != "" and len(seen) == 1
    assert generator.generate_n_best(WHITE, num_beams=2, num_return_sequences=2) == [[ScoredText("", 0.0)] * 2] * 6
    assert len(seen) == 1


@pytest.mark.parametrize("are_configured", [True, False])
def test_n_best_is_as_many_as_asked_for_best_first(generator, are_configured):
    options = {"num_beams": 3, "num_return_sequences": 3}
    expected = generator.generate([*SOURCES, ""], num_beams=3)
    generator.model.generation_config.update(**(options if are_configured else {}))
    results = generator.generate_n_best([*SOURCES, ""], **({} if are_configured else options))
    for candidates in results:
        assert len(candidates) == 3
        assert [c.score for c in candidates] == sorted((c.score for c in candidates), reverse=True)
    assert [candidates[0].text for candidates in results] == expected


@pytest.mark.parametrize("members", [0, 1])
def test_options_of_sampling_sample_as_on_the_command_line(members):
    generator = tiny_generator(members=[tiny_generator(seed=1) for _ in range(members)])
    options = {"num_return_sequences": 3}
    torch.manual_seed(3)
    samples = generator.generate_n_best(SOURCES, top_p=0.8, **options)
    torch.manual_seed(3)
    assert generator.generate_n_best(SOURCES, top_p=0.8, do_sample=True, **options) == samples
    assert any(len({sample.text for sample in row}) == 3 for row in samples)
    greedy = generator.generate_n_best(SOURCES, top_p=0.8, do_sample=False)
    assert greedy == generator.generate_n_best(SOURCES, top_p=None)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3, "num_return_sequences": 3}, {"do_sample": True, "num_return_sequences": 2}]
)
def test_targets_and_scores_are_the_same_without_rings(generator, options, monkeypatch):
    rows = []
    for has_rings in (True, False):
        if not has_rings:
            monkeypatch.setattr(batches, "plugin", lambda place: None)
            for name in ("_sample", "_beam_search"):
                monkeypatch.setattr(type(generator.model), name, getattr(GenerationMixin, name))
        torch.manual_seed(3)
        rows.append([candidate for row in generator.generate_n_best(SOURCES, **options) for candidate in row])
    assert [candidate.text for candidate in rows[1]] == [candidate.text for candidate in rows[0]]
    assert [candidate.score for candidate in rows[1]] == pytest.approx([c.score for c in rows[0]], abs=1e-4)


def test_scores_of_samples_are_log_probabilities_under_the_model(generator, sources):
    # Only the most probable token is left, whose probability would then be 1.
    options = {"do_sample": True, "top_p": 1e-6}
    hypotheses = generator.generate_ids(SOURCES, return_scores=True, **options)
    forced = generator.score(SOURCES, [sample.ids for [sample] in hypotheses])
    assert [sample.score for [sample] in hypotheses] == pytest.approx([score.total for score in forced], abs=1e-4)
    assert max(score.total for score in forced) < -0.1


def test_generate_and_evaluate_write_one_target_whatever_the_models_own_settings_say(generator):
    greedy, beams = generator.generate(SOURCES), generator.generate(SOURCES, num_beams=3)
    generator.model.generation_config.update(num_beams=3, num_return_sequences=3)
    assert generator.generate(SOURCES) == beams and generator.generate(SOURCES, num_beams=1) == greedy
    _, predictions = evaluate_generator(generator, SOURCES, TARGETS, metrics=["chrf"])
    assert predictions == beams
    with pytest.raises(ValueError, match=r"`num_return_sequences` must be 1 for `generate`, got 2"):
        generator.generate(SOURCES, num_beams=2, num_return_sequences=2)
    for field in ("batch_size", "max_tokens_per_batch"):
        with pytest.raises(ValueError, match=f"`{field}` must be at least 1, got 0"):
            tiny_generator(**{field: 0})


@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_stream_is_the_same_for_any_chunk_size_and_reads_one_chunk_ahead(generator, chunk_size):
    read = []
    stream = generator.generate_stream((read.append(text) or text for text in [*SOURCES, ""]), chunk_size=chunk_size)
    first = next(stream)
    assert min(chunk_size, 6) <= len(read) <= min(2 * chunk_size, 6)
    assert [candidates[0].text for candidates in [first, *stream]] == generator.generate([*SOURCES, ""])


def test_unfinished_targets_are_counted(generator):
    generator.generate([*SOURCES, ""], max_new_tokens=3, eos_token_id=-1)
    assert generator.num_unfinished == len(SOURCES)
    generator.generate_n_best(SOURCES, max_new_tokens=3, eos_token_id=-1, num_beams=2, num_return_sequences=2)
    assert generator.num_unfinished == 3 * len(SOURCES)
    generator.generate(SOURCES, eos_token_id=list(range(len(generator.tokenizers.target))))
    assert generator.num_unfinished == 3 * len(SOURCES)


@pytest.mark.parametrize("members", [0, 1])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_target_that_repeats_itself_is_decoded_again(beams, members):
    generator = tiny_generator(kind="byte_bpe")
    generator = Generator(generator.model, generator.tokenizers, members=[generator] * members)
    options = {"num_beams": beams, "max_new_tokens": 40}
    plain = generator.generate(SOURCES, **options)
    looping = [index for index, target in enumerate(plain) if find_loop(SOURCES[index], target)]
    # An untrained model has real loops.
    assert 0 < len(looping) < len(SOURCES) or beams > 1
    num_unfinished = generator.num_unfinished
    mended = generator.generate(SOURCES, end_loops=True, **options)
    assert generator.num_loops == len(looping) and generator.num_looping == 0
    assert generator.num_unfinished <= 2 * num_unfinished
    again = generator.generate([SOURCES[index] for index in looping], no_repeat_ngram_size=3, **options)
    for index, target in enumerate(mended):
        assert target == (again[looping.index(index)] if index in looping else plain[index])
    rows = [row[0].text for row in generator.generate_stream(SOURCES, end_loops=True, chunk_size=2, **options)]
    assert rows == mended


def test_a_target_that_still_repeats_itself_stays(generator, monkeypatch):
    plain = generator.generate(SOURCES, max_new_tokens=20)
    assert plain != generator.generate(SOURCES, max_new_tokens=20, no_repeat_ngram_size=3)
    monkeypatch.setattr(documents, "find_loop", lambda source, target: target)
    assert generator.generate(SOURCES, max_new_tokens=20, end_loops=True) == plain
    assert generator.num_looping == len(SOURCES)


@pytest.mark.parametrize(
    ("texts", "message"), [("a man", "got the single string 'a man'"), (["a cat", None], "got NoneType as text 2")]
)
def test_what_is_no_list_of_texts_is_refused(texts, message, generator):
    for decoded in (generator.generate, generator.generate_n_best, generator.generate_mbr):
        with pytest.raises(ValueError, match="`texts` .*" + message):
            decoded(texts)
    for options in ({}, {"risk": {"num_candidates": 2}}):
        with pytest.raises(ValueError, match="`lines` .*" + message):
            list(generator.generate_stream(texts, **options))


@pytest.mark.parametrize(
    ("option", "value"),
    [("device", "foo"), ("device", "meta"), ("device", "cuda:99"), ("dtype", "foo"), ("dtype", "linspace")],
)
def test_devices_and_types_that_torch_has_not_are_refused_before_loading(option, value):
    with pytest.raises(ValueError, match=f"`{option}` .* got '{value}'"):
        Generator.from_pretrained("no-such/model", **{"device": "cpu", option: value})


@pytest.mark.parametrize("joint", [True, False])
def test_loaded_is_saved_and_a_prefix_stands_before_texts(joint, tmp_path):
    generator = tiny_generator(joint=joint)
    generator.model.train()
    loaded = Generator.from_pretrained(save_generator(generator, tmp_path), device="cpu", source_prefix="a ")
    assert not loaded.model.training and loaded.source_prefix == "a "
    targets = loaded.generate([*SOURCES, " "])
    assert targets == [*generator.generate(["a " + text for text in SOURCES]), ""]
    assert targets[:-1] != generator.generate(SOURCES)
    for dtype in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert Generator.from_pretrained(tmp_path, device="cpu", dtype=dtype).model.dtype == torch.bfloat16


LIMIT_SECONDS = 60


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
        process.stderr.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()

import copy
import gzip
import json
import math
from collections import Counter
from itertools import chain, pairwise, permutations

import datasets
import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader, RandomSampler

from metaphrase.augmentation import denoising
from metaphrase.augmentation.denoising import load_texts, longest_block, make_objective, objective_tokens, text_blocks
from metaphrase.data.token_budget import announce_epoch
from metaphrase.tokenization import TokenizerPair, train_tokenizer

END, MASK, STOP, QUESTION = 1, 3, 4, 5
SENTINELS = tuple(range(999, 799, -1))
MODES = {"R": 11, "S": 12, "X": 13}
SETTINGS = [(0.15, 3.0), (0.5, 8.0), (0.5, 64.0), (0.1, 1.0), (0.25, 2.5)]


def corruption(density=0.15, mean=3.0, sentinels=SENTINELS):
    return denoising.SpanCorruption(
        sentinel_ids=sentinels, eos_token_id=END, noise_density=density, mean_span_length=mean
    )


def infilling(**fields):
    return denoising.TextInfilling(**{"mask_token_id": MASK, "eos_token_id": END, **fields})


OBJECTIVES = {
    "span_corruption": corruption(),
    "ul2": denoising.MixtureOfDenoisers(SENTINELS, END, MODES),
    "text_infilling": infilling(full_stop_ids=[STOP]),
    "prefix_lm": denoising.PrefixLM(END),
}
# Two draws are often equal.
SMALL_CHOICES = ("ul2", "prefix_lm")


def generator(seed=0):
    return np.random.default_rng(seed)


def restored(source, target):
    """Put each span of the target into the place of its sentinel in the source."""
    assert source[-1] == END and target[-1] == END
    spans, current = {}, None
    for token in target[:-1]:
        if token in SENTINELS:
            current = token
            assert token not in spans
            spans[token] = []
        else:
            spans[current].append(token)
    whole = []
    for token in source[:-1]:
        whole += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return whole


def test_the_papers_example():
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "<X>", "<Y>", "</s>"]
    sides = denoising.replace_spans(range(10), np.array([[2, 4], [8, 9]]), [10, 11], 12)
    source, target = (" ".join(words[index] for index in side) for side in sides)
    assert source == "Thank you <X> me to your party <Y> week </s>" and target == "<X> for inviting <Y> last </s>"


# In the last setting, a block has as many spans as its kept tokens can separate.
@pytest.mark.parametrize(("density", "mean"), [*SETTINGS, (0.8, 1.0)])
@pytest.mark.parametrize("length", [2, 3, 20, 129])
def test_spans_have_the_stated_number_and_lengths_and_no_token_is_lost(density, mean, length):
    objective = corruption(density, mean)
    num_noise = min(max(round(length * density), 1), length - 1)
    num_spans = min(max(round(num_noise / mean), 1), length - num_noise)
    for seed in range(4):
        block = generator(seed).integers(2, 700, size=length)
        source, target = (side.tolist() for side in objective(block, generator(seed)))
        assert restored(source, target) == block.tolist()
        assert (len(source), len(target)) == objective.lengths(length)
        sentinels = [token for token in source if token in SENTINELS]
        assert sentinels == list(SENTINELS[:num_spans]) == [token for token in target if token in SENTINELS]
        assert len(target) - 1 - num_spans == num_noise
        # A kept token stands before each span, and nothing stands behind the last one.
        assert source[0] not in SENTINELS and source[-2] == sentinels[-1]
        assert not any(one in SENTINELS and two in SENTINELS for one, two in pairwise(source))


def test_all_segmentations_are_equally_likely():
    random, draws = generator(), 6000
    seen = Counter(tuple(denoising.random_segmentation(6, 3, random).tolist()) for _ in range(draws))
    assert set(seen) == {(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)}
    # Six standard deviations of a count.
    assert all(abs(times - draws / 10) < 6 * (draws * 0.09) ** 0.5 for times in seen.values())


def test_the_longest_block_fills_the_limits():
    # Published lengths of T5.
    assert corruption().lengths(568) == (512, 114) and longest_block(corruption(), 512) == 568
    for density, mean in SETTINGS:
        objective = corruption(density, mean, range(1000, 3000))
        for length in range(20, 300, 29):
            block_length = longest_block(objective, length)
            assert objective.lengths(block_length)[0] == length < objective.lengths(block_length + 1)[0]
    block_length = longest_block(corruption(0.5), 100, 60)
    assert corruption(0.5).lengths(block_length)[1] <= 60 < corruption(0.5).lengths(block_length + 1)[1]
    # The S-denoiser may leave all but one token: sentinel, mode token and end come on top.
    assert longest_block(OBJECTIVES["ul2"], 512, 512) == 510


def test_limits_and_sentinels_that_do_not_suffice_are_refused():
    with pytest.raises(ValueError, match="must hold the pair of a block of 2 tokens"):
        longest_block(corruption(), 2)
    with pytest.raises(ValueError, match="`num_sentinels` must be at least 28 for 568 tokens"):
        longest_block(corruption(sentinels=SENTINELS[:27]), 512)


@pytest.mark.parametrize("length", [1, 2, 10, 77, 400])
def test_exactly_the_share_of_tokens_is_masked_and_the_rest_keeps_its_order(length):
    for seed in range(8):
        block = np.arange(10, 10 + length)
        source, target = infilling()(block, generator(seed))
        kept = [token for token in source[:-1].tolist() if token != MASK]
        assert len(kept) == length - max(round(0.3 * length), 1)
        assert kept == sorted(kept) and set(kept) <= set(block.tolist())
        assert target.tolist() == [*block.tolist(), END] and source[-1] == END
        # Also with many empty spans, a source is never longer than its block.
        assert len(source) <= infilling().lengths(length)[0] == length + 1


@pytest.mark.parametrize("mean", [1.5, 6.0])
def test_span_lengths_are_poisson_distributed_in_random_order(mean):
    objective = infilling(mean_span_length=mean)
    lengths = np.concatenate([objective.span_lengths(20_000, generator(seed)) for seed in range(10)])
    for value in range(6):
        share = math.exp(-mean) * mean**value / math.factorial(value)
        assert (lengths == value).mean() == pytest.approx(share, abs=0.01)
    # The span that is shortened to fit may be any.
    ends = [objective.span_lengths(20, generator(seed))[[0, -1]] for seed in range(4000)]
    first, last = np.sum(ends, axis=0)
    assert first == pytest.approx(last, rel=0.06)


def test_sentences_take_each_order_within_their_document():
    # Several marks end one sentence, and the last sentence needs none.
    sentences = [[10, STOP], [11, 12, QUESTION, STOP, QUESTION], [14, 15]]
    document, orders, objective = [*chain(*sentences)], Counter(), infilling(full_stop_ids=[STOP, QUESTION])
    for seed in range(1500):
        shuffled = objective.permute_sentences(np.array([*document, END, END, *document]), generator(seed)).tolist()
        assert shuffled[len(document) :][:2] == [END, END]
        orders.update(map(tuple, (shuffled[: len(document)], shuffled[-len(document) :])))
    assert set(orders) == {tuple(chain(*order)) for order in permutations(sentences)}
    assert min(orders.values()) > 380 and orders.total() == 3000


def test_the_seven_denoisers_have_equal_shares_their_modes_and_no_lost_token():
    mixture, block, seen, longest = OBJECTIVES["ul2"], np.arange(20, 276), Counter(), [0, 0]
    for seed in range(700):
        source, target = (side.tolist() for side in mixture(block, generator(seed)))
        longest = [max(most, len(side)) for most, side in zip(longest, (source, target), strict=True)]
        spans = sum(token in SENTINELS for token in source)
        seen[(source[0], spans if source[0] != MODES["S"] else None)] += 1
        assert restored(source[1:], target) == block.tolist()
    # By mode and number of spans: 38 or 128 hidden tokens in spans of 3, 8 or 64.
    expected = {(11, 13): 1, (11, 5): 1, (13, 43): 1, (13, 16): 1, (13, 1): 1, (13, 2): 1, (12, None): 1}
    assert seen.keys() == expected.keys()
    assert all(count == pytest.approx(100, abs=60) for count in seen.values())
    assert longest[0] <= mixture.lengths(256)[0] and longest[1] <= mixture.lengths(256)[1]


def test_suffixes_of_the_sequential_denoiser_have_the_mean_of_the_paper():
    sides = [
        denoising.MixtureOfDenoisers(SENTINELS, END, MODES)(np.arange(20, 60), generator(seed)) for seed in range(2500)
    ]
    suffixes = [len(target) - 2 for source, target in sides if source[0] == MODES["S"]]
    assert set(suffixes) == set(range(1, 20)) and np.mean(suffixes) == pytest.approx(10, rel=0.1)
    assert max(len(source) for source, _ in sides) == OBJECTIVES["ul2"].lengths(40)[0]


def test_a_prefix_and_its_continuation_are_the_block():
    block, starts = np.arange(20, 26), Counter()
    for seed in range(500):
        source, target = OBJECTIVES["prefix_lm"](block, generator(seed))
        assert source[-1] == target[-1] == END and [*source[:-1], *target[:-1]] == [*block]
        starts[len(target) - 1] += 1
    assert starts.keys() == {1, 2, 3, 4, 5} and min(starts.values()) > 70
    assert make_objective("prefix_lm", tokenizer_with()) == denoising.PrefixLM(2) and not objective_tokens("prefix_lm")


def tokenizer_with(*tokens):
    texts = ["It rains. Does it? It does!"]
    return train_tokenizer(texts, kind="char", additional_special_tokens=tokens, show_progress=False)


def test_objectives_take_their_tokens_from_the_tokenizer():
    tokenizer = tokenizer_with(*objective_tokens("span_corruption"))
    spans, defaults = (make_objective("span_corruption", tokenizer, *given) for given in ((0.5, 8.0), ()))
    assert tokenizer.convert_ids_to_tokens(list(spans.sentinel_ids)) == list(objective_tokens("span_corruption"))
    assert (spans.noise_density, spans.mean_span_length) == (0.5, 8.0)
    assert (defaults.noise_density, defaults.mean_span_length) == (0.15, 3.0)
    assert not make_objective("ul2", tokenizer).mode_token_ids
    for names in (objective_tokens("ul2", 0), ("[NLU]", "[S2S]", "[NLG]")):
        tokenizer = tokenizer_with(*names, *objective_tokens("span_corruption", 5))
        mixture = make_objective("ul2", tokenizer)
        assert [tokenizer.convert_ids_to_tokens(mixture.mode_token_ids[mode]) for mode in "RSX"] == list(names)
        assert len(mixture.sentinel_ids) == 5
    tokenizer = tokenizer_with(*objective_tokens("text_infilling"))
    infills = make_objective("text_infilling", tokenizer, noise_density=0.2)
    assert tokenizer.convert_ids_to_tokens(infills.mask_token_id) == "<mask>" and infills.noise_density == 0.2
    assert sorted(tokenizer.convert_ids_to_tokens(list(infills.full_stop_ids))) == ["!", ".", "?"]
    for name in ("span_corruption", "text_infilling"):
        with pytest.raises(ValueError, match=f"A tokenizer must have .* for `objective` {name}, got n"):
            make_objective(name, tokenizer_with())


def make_dataset(name="span_corruption", seed=0, count=24, length=60):
    ids = generator(7).integers(20, 56, size=(count, length))
    return denoising.DenoisingDataset(datasets.Dataset.from_dict({"input_ids": ids.tolist()}), OBJECTIVES[name], seed)


def pairs_of(dataset, epoch):
    dataset = copy.deepcopy(dataset)
    dataset.set_epoch(epoch)
    return [dataset[index] for index in range(len(dataset))]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_noise_depends_on_seed_epoch_and_index_alone(name):
    dataset = make_dataset(name)
    first = [dataset[index] for index in range(24)]
    assert [dataset[index] for index in reversed(range(24))][::-1] == first == pairs_of(make_dataset(name), 0)
    for other in (pairs_of(dataset, 1), pairs_of(make_dataset(name, seed=1), 0)):
        assert sum(one == two for one, two in zip(first, other, strict=True)) <= (5 if name in SMALL_CHOICES else 0)
    same = denoising.DenoisingDataset(dataset.blocks.select([0] * 20), OBJECTIVES[name])
    assert len({str(same[index]) for index in range(20)}) >= (12 if name in SMALL_CHOICES else 18)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_lengths_are_known_before_the_pairs(name):
    dataset = make_dataset(name, count=6)
    sides = list(zip(dataset["source_length"], dataset["target_length"], strict=True))
    assert sides == [OBJECTIVES[name].lengths(60)] * 6 and dataset["length"] == [sum(pair) for pair in sides]
    for epoch in range(10):
        for (source, target), pair in zip(sides, pairs_of(dataset, epoch), strict=True):
            lengths = len(pair["input_ids"]), len(pair["labels"])
            assert lengths[0] <= source and lengths[1] <= target
            assert lengths == (source, target) or not isinstance(OBJECTIVES[name], denoising.SpanCorruption)


@pytest.mark.parametrize("skipped", [0, 1])
def test_epochs_reach_every_process_and_resumed_loaders(skipped):
    pairs = []
    for process in range(2):
        dataset = make_dataset()
        loader = DataLoader(dataset, batch_size=3, sampler=RandomSampler(dataset), collate_fn=list)
        options = {"num_processes": 2, "use_seedable_sampler": True, "data_seed": 0}
        loader = prepare_data_loader(loader, process_index=process, **options)
        for epoch in (2, 4):
            announce_epoch(loader, epoch)
            found = [*chain.from_iterable(skip_first_batches(loader, skipped) if skipped else loader)]
            assert dataset.epoch == epoch and all(pair in pairs_of(make_dataset(), epoch) for pair in found)
            pairs += found
    assert len({str(pair) for pair in pairs}) == len(pairs) == 2 * (24 - 6 * skipped)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


TEXTS = ["abcde", "f", "", "gh ij", " \u3000", "\t", "klmnopqrstuvwxyzabc", "~", "xy"]


class Letters:
    """One id for each letter and tab (spaces and ~ have none), then the end."""

    is_joint = True

    def __init__(self):
        self.calls = 0

    def encode_sources(self, texts):
        self.calls += 1
        return [[ord(letter) for letter in text if letter not in " \u3000~"] + [END] for text in texts]


def dataset_of(texts):
    return datasets.Dataset.from_dict({"text": list(texts)})


def stream_of(texts):
    """All tokens in one row, by the definition alone."""
    rows = ([ord(letter) for letter in text if letter not in " \u3000~"] for text in filter(str.strip, texts))
    return [*chain.from_iterable([*row, END] for row in rows if row)]


@pytest.mark.parametrize("texts_per_call", [2, 1000])
@pytest.mark.parametrize("length", [2, 7, 12])
def test_blocks_joined_are_the_text_and_the_rest_is_counted(cache, monkeypatch, length, texts_per_call):
    monkeypatch.setattr(denoising, "TEXTS_PER_CALL", texts_per_call)
    whole = stream_of(TEXTS)
    blocks, report = text_blocks(dataset_of(TEXTS), Letters(), length)
    full, rest = divmod(len(whole), length)
    rows = blocks["input_ids"][:]
    assert [*chain.from_iterable(rows)] == whole[: full * length] and {len(row) for row in rows} == {length}
    assert (report.tokens, report.blocks, report.remainder_tokens) == (len(whole), full, rest)
    assert (report.documents, report.empty_documents) == (len(TEXTS), 4)
    tokenizers = TokenizerPair(train_tokenizer(["a b"], kind="char"), train_tokenizer(["a b"], kind="char"))
    with pytest.raises(ValueError, match="`tokenizers` must be joint"):
        text_blocks(dataset_of(TEXTS), tokenizers, 10)
    with pytest.raises(ValueError, match="must fill at least one block of 1000 tokens"):
        text_blocks(dataset_of(TEXTS), Letters(), 1000)


def test_a_second_run_reads_the_cache_with_all_counts(cache, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(text + "\n" for text in TEXTS), encoding="utf-8")

    def cut(tokenizers, length=7):
        return text_blocks(load_texts(file), tokenizers, length)

    again, other = Letters(), Letters()
    blocks, report = cut(Letters())
    blocks_again, report_again = cut(again)
    assert again.calls == 0 and report_again == report and blocks_again["input_ids"][:] == blocks["input_ids"][:]
    assert json.loads(json.dumps(report.to_dict()))["tokens"] == 36
    cut(other, length=8)
    assert other.calls == 1
    file.write_text("another text altogether\n")
    assert cut(Letters())[1].documents == 1


def test_lines_are_read_and_unreadable_ones_are_errors_or_counted(cache, tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\ufeffone\u2028two\r\n\nthree".encode()))
    assert load_texts(tmp_path / "a.txt.gz", 2)["text"][:] == ["one\u2028two", ""]
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        load_texts(tmp_path / "none.txt")
    (tmp_path / "a.txt").write_bytes(b"ab\nb\xffd\n\ncde\n\xc3\n")
    with pytest.raises(ValueError, match="must be UTF-8, but line 2 has the byte 0xff"):
        load_texts(tmp_path / "a.txt")
    texts = load_texts(tmp_path / "a.txt", invalid_utf8="skip")
    assert texts["text"][:] == ["ab", None, "", "cde", None]
    for _ in range(2):
        blocks, report = text_blocks(texts, Letters(), 7)
        assert [*chain.from_iterable(blocks["input_ids"][:])] == stream_of(["ab", "cde"])
        assert (report.documents, report.empty_documents, report.invalid_documents) == (5, 1, 2)

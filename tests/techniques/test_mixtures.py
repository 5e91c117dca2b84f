from collections import Counter

import datasets
import numpy as np
import pytest

from metaphrase.augmentation.augmentation import AugmentedPairs, Augmenter
from metaphrase.data.encoding import encode_pairs
from metaphrase.techniques.mixtures import StagedPairs, StagedSampler, parse_stages
from metaphrase.tokenization import TokenizerPair

SIZES = {"clean": 30, "synthetic": 70}
STAGES = {
    "start": {"shares": {"clean": 0.3, "synthetic": 0.7}, "until": {"synthetic": 2}},
    "end": {"shares": {"clean": 1.0}, "until": {"clean": 1.5}},
}
LENGTHS = np.random.default_rng(0).integers(3, 30, (100, 2))


def make_sampler(stages=STAGES, sizes=SIZES, seed=1, processes=(1, 0), lengths=LENGTHS):
    return StagedSampler(sizes, parse_stages(stages, list(sizes)), lengths, 120, seed, *processes)


def test_stages_read_their_shares_in_order():
    batches = list(make_sampler())
    assert len(batches) == len(make_sampler())
    indices = [index for batch in batches for index in batch]
    # Two readings of 70 pairs and 60 of the other data set, then 45 of that one.
    first, second = indices[:200], indices[200:]
    assert Counter(index % 100 for index in first if index % 100 >= 30) == dict.fromkeys(range(30, 100), 2)
    assert Counter(index % 100 for index in first if index % 100 < 30) == dict.fromkeys(range(30), 2)
    # A round ends before the next begins.
    assert {index % 100 for index in first[:100]} == set(range(100))
    # The reading goes on: the second stage has the third one, and half of the fourth.
    assert len(second) == 45 and Counter(index // 100 for index in second) == {2: 30, 3: 15}
    assert max(Counter(indices).values()) == 1


def test_batches_keep_the_budget_and_depend_on_the_seed():
    batches = list(make_sampler())
    for batch in batches:
        assert len(batch) * LENGTHS[np.array(batch) % 100].max(axis=0).sum() <= 120
    assert batches == list(make_sampler()) != list(make_sampler(seed=2))
    assert len(batches) < 1.6 * LENGTHS[np.concatenate(batches) % 100].sum() / 120


def test_processes_share_the_batches_of_each_stage():
    processes = 3
    samplers = [make_sampler(processes=(processes, rank)) for rank in range(processes)]
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])}
    together = [index for step in zip(*shares, strict=True) for batch in step for index in batch]
    assert Counter(together) == Counter(index for batch in make_sampler() for index in batch)
    assert {index // 100 for index in together[200:]} == {2, 3}


def test_a_round_with_fewer_pairs_than_processes_repeats_some():
    stages = {"only": {"shares": {"a": 1}, "until": {"a": 2}}}
    shares = [list(make_sampler(stages, {"a": 2}, processes=(3, rank), lengths=LENGTHS[:2])) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2]
    assert {index for share in shares for index in share[0]} == {0, 1}
    assert {index for share in shares for index in share[1]} == {2, 3}


def test_staged_pairs_change_with_each_reading():
    texts = datasets.Dataset.from_list([{"source": f"a dog {number}", "target": "der Hund"} for number in range(4)])
    tokenizers = TokenizerPair.train(texts["source"][:], texts["target"][:], vocab_size=280, show_progress=False)
    encoded, _ = encode_pairs(texts, tokenizers, max_source_length=30, max_target_length=30, keep_text=True)
    augmented = AugmentedPairs(encoded, Augmenter(tokenizers, 0, (30, 30), 0.5))
    stages = parse_stages({"only": {"shares": {"a": 1}, "until": {"a": 3}}}, ["a"])
    plain, pairs = (StagedPairs(each, {"a": 4}, stages) for each in (encoded, augmented))
    assert [pair["labels"] for pair in plain.__getitems__([1, 5])] == [encoded[1]["labels"]] * 2
    readings = pairs.__getitems__([1, 5, 9])
    assert len({tuple(pair["input_ids"]) for pair in readings}) > 1
    assert tokenizers.decode_targets([pair["input_ids"] for pair in readings]) == ["a dog 1"] * 3
    pairs.set_epoch(1)
    assert pairs.__getitems__([1, 5, 9]) != readings
    assert pairs["source_length"] == augmented["source_length"]


SHARES = {"shares": {"clean": 1, "synthetic": 1}}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("clean", "`stages.start` must be a valid dictionary .* got 'clean'"),
        (SHARES, "`stages.start.until` must be given"),
        (SHARES | {"until": {"clean": 1, "synthetic": 1}}, "`stages.start.until` .* at most 1 item"),
        (SHARES | {"until": {"cleen": 1}}, "`stages.start.until` must name .* got 'cleen'. Did you mean"),
        (SHARES | {"until": {"clean": 0}}, "`stages.start.until.clean` must be above 0, got 0"),
        ({"shares": {"synthetic": 1}, "until": {"clean": 1}}, "`stages.start.until` must name .* its `shares`"),
        ({"shares": {"clean": 1}, "until": {"clean": 1}}, "`datasets` must each have a share .* none for synthetic"),
    ],
)
def test_a_stage_of_another_form_is_refused(stage, message):
    with pytest.raises(ValueError, match=message):
        parse_stages({"start": stage}, ["clean", "synthetic"])

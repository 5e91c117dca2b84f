"""Denoising: the noise of a block depends on seed, epoch and index alone, also with workers and after resuming."""

import copy
import pickle
from collections import defaultdict

import datasets
import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from tiny_models import tiny_model
from torch.utils.data import DataLoader, RandomSampler
from transformers import Seq2SeqTrainingArguments

from metaphrase.data.collators import PairCollator
from metaphrase.data.denoising.dataset import (
    DenoisingDataset,
    make_objective,
    noise_generator,
    objective_tokens,
    sentinel_ids_of,
)
from metaphrase.data.denoising.objectives import SpanCorruption, TextInfilling, ul2_mixture
from metaphrase.data.token_budget import LengthGroupedSampler
from metaphrase.tokenization import sentinel_tokens, train_tokenizer
from metaphrase.training.checkpointing.trainer_mixin import announce_epoch
from metaphrase.training.trainer import MetaphraseTrainer

END = 2
SENTINELS = tuple(range(59, 39, -1))
OBJECTIVES = {
    "span_corruption": SpanCorruption(sentinel_ids=SENTINELS, eos_token_id=END),
    "ul2": ul2_mixture(SENTINELS, END, {"R": 39, "S": 38, "X": 37}),
    "text_infilling": TextInfilling(mask_token_id=36, eos_token_id=END, full_stop_ids=[35]),
}


def make_blocks(count=24, length=60):
    ids = np.random.default_rng(7).integers(4, 36, size=(count, length))
    return datasets.Dataset.from_dict({"input_ids": ids.tolist()})


def make_dataset(objective="span_corruption", seed=0, **shape):
    return DenoisingDataset(make_blocks(**shape), OBJECTIVES[objective], seed)


class Recorder(PairCollator):
    def __init__(self):
        super().__init__(0)
        self.seen = []

    def __call__(self, pairs):
        self.seen.append([(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in pairs])
        return super().__call__(pairs)


def make_trainer(dataset, folder, collator, **options):
    settings = {"report_to": "none", "remove_unused_columns": False, "disable_tqdm": True, "use_cpu": True}
    settings |= {"per_device_train_batch_size": 4, "save_strategy": "no", "dataloader_pin_memory": False}
    return MetaphraseTrainer(
        model=tiny_model(vocab_size=60, encoder_layers=1, decoder_layers=1),
        args=Seq2SeqTrainingArguments(output_dir=str(folder), **(settings | options)),
        train_dataset=dataset,
        data_collator=collator,
    )


def pairs_of(dataset, epoch):
    """All pairs of an epoch, each alone."""
    dataset = copy.deepcopy(dataset)
    dataset.set_epoch(epoch)
    return [dataset[index] for index in range(len(dataset))]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_noise_depends_on_seed_epoch_and_index_alone(name):
    dataset = make_dataset(name)
    first = [dataset[index] for index in range(24)]
    assert [dataset[index] for index in reversed(range(24))][::-1] == first
    assert pairs_of(make_dataset(name), 0) == first
    for other in (pairs_of(dataset, 1), pairs_of(make_dataset(name, seed=1), 0)):
        assert sum(one == two for one, two in zip(first, other, strict=True)) <= (5 if name == "ul2" else 0)
    same = datasets.Dataset.from_dict({"input_ids": make_blocks(1)["input_ids"][:] * 20})
    same_block = DenoisingDataset(same, OBJECTIVES[name])
    assert len({str(same_block[index]) for index in range(20)}) >= (15 if name == "ul2" else 18)


def test_generators_differ_where_their_arguments_do():
    arguments = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (2**40, 0, 0), (0, 2**40, 0), (0, 0, 2**40)]
    drawn = {noise_generator(*numbers).integers(2**62) for numbers in arguments}
    assert len(drawn) == len(arguments)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_lengths_are_known_before_the_pairs(name):
    blocks = datasets.Dataset.from_dict({"input_ids": [list(range(4, 34))] * 6 + [list(range(4, 15))]})
    # A data set that selects rows has its table in another order.
    dataset = DenoisingDataset(blocks.select([0, 6, 1, 2]), OBJECTIVES[name])
    sides = list(zip(dataset["source_length"], dataset["target_length"], strict=True))
    assert dataset["length"] == [sum(pair) for pair in sides]
    assert sides == [OBJECTIVES[name].lengths(length) for length in (30, 11, 30, 30)]
    for epoch in range(30):
        for (source, target), pair in zip(sides, pairs_of(dataset, epoch), strict=True):
            assert len(pair["input_ids"]) <= source and len(pair["labels"]) <= target
            if OBJECTIVES[name].lengths_are_exact:
                assert len(pair["input_ids"]) == source and len(pair["labels"]) == target
    assert {"source_length", "target_length", "length"} < set(dataset.column_names)


def test_rows_are_indexed_as_in_a_sequence():
    dataset = make_dataset()
    assert len(dataset) == 24 and dataset[-1] == dataset[23] and dataset[np.int64(3)] == dataset[3]
    assert isinstance(dataset[0]["input_ids"][0], int)
    with pytest.raises(IndexError):
        dataset[24]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [5]]}), "at least 2 tokens to be corrupted, got 1"),
        (make_blocks(1, 800), "`sentinel_ids` must hold at least 40 ids for blocks of 800 tokens"),
    ],
)
def test_wrong_blocks_are_refused_at_once(blocks, message):
    with pytest.raises(ValueError, match=message):
        DenoisingDataset(blocks, OBJECTIVES["span_corruption"])


def test_fixed_noise_gives_a_warning(caplog):
    make_dataset(length=31)
    assert not caplog.records
    make_dataset(length=30)
    assert "Blocks of 30 tokens have a single hidden span, which is always their end" in caplog.text
    caplog.clear()
    # The spans of 64 tokens alone: of fewer than one and a half, the other denoisers have several.
    DenoisingDataset(make_blocks(1, 127), ul2_mixture(range(1000, 900, -1), 2))
    assert "For 2 of 7 denoisers: Blocks of 127 tokens have a single hidden span" in caplog.text
    caplog.clear()
    DenoisingDataset(make_blocks(1, 700), ul2_mixture(range(1000, 500, -1), 2))
    assert not caplog.records


def test_copies_keep_the_epoch_in_shared_memory():
    dataset = make_dataset()
    dataset.set_epoch(3)
    for other in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert other.epoch == 3 and other[5] == dataset[5] and other._epoch.is_shared()
        other.set_epoch(4)
        assert dataset.epoch == 3


def flat(loader):
    return [pair for batch in loader for pair in batch]


@pytest.mark.parametrize(
    ("context", "is_persistent"), [("fork", True), ("fork", False), pytest.param("spawn", True, marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
def test_workers_see_each_epoch(context, is_persistent):
    dataset = make_dataset()
    options = {"num_workers": 2, "persistent_workers": is_persistent, "multiprocessing_context": context}
    loader = DataLoader(dataset, batch_size=4, collate_fn=list, **options)
    for epoch in (0, 1, 5):
        dataset.set_epoch(epoch)
        assert flat(loader) == pairs_of(dataset, epoch)


@pytest.mark.parametrize("sampler", ["random", "grouped"])
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("processes", [1, 2])
def test_epochs_reach_every_process_and_resumed_loaders(processes, skipped, sampler):
    found = defaultdict(list)
    orders = set()
    for process in range(processes):
        dataset = make_dataset()
        made = RandomSampler(dataset) if sampler == "random" else LengthGroupedSampler(dataset["length"], 3, seed=0)
        loader = DataLoader(dataset, batch_size=3, sampler=made, collate_fn=list)
        loader = prepare_data_loader(
            loader, num_processes=processes, process_index=process, use_seedable_sampler=True, data_seed=0
        )
        for epoch in (2, 4):
            announce_epoch(loader, epoch)
            found[epoch] += flat(skip_first_batches(loader, skipped) if skipped else loader)
            assert dataset.epoch == epoch
            orders.add(getattr(made, "epoch", epoch) if sampler == "grouped" else epoch)
    assert orders == {2, 4}
    for epoch, pairs in found.items():
        expected = pairs_of(make_dataset(), epoch)
        assert len(pairs) == len(expected) - 3 * processes * skipped
        assert all(pair in expected for pair in pairs) and len({str(pair) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_resumed_run_sees_the_noise_of_an_uninterrupted_one(tmp_path, strategy):
    options = {"num_train_epochs": 3, "train_sampling_strategy": strategy, "gradient_accumulation_steps": 2}
    whole, resumed = Recorder(), Recorder()
    # An epoch is six batches, three steps: the fourth step lies within the second epoch.
    make_trainer(make_dataset(), tmp_path, whole, save_strategy="steps", save_steps=4, **options).train()
    trainer = make_trainer(make_dataset(), tmp_path, resumed, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert len(whole.seen) == 18
    assert resumed.seen == whole.seen[8:]
    for epoch in range(3):
        expected = {(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in pairs_of(make_dataset(), epoch)}
        assert {pair for batch in whole.seen[6 * epoch : 6 * epoch + 6] for pair in batch} == expected


def test_epochs_go_on_where_a_run_stopped_at_the_end_of_one(tmp_path):
    make_trainer(make_dataset(), tmp_path, Recorder(), save_strategy="epoch", num_train_epochs=1).train()
    seen = Recorder()
    trainer = make_trainer(make_dataset(), tmp_path, seen, num_train_epochs=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    expected = {tuple(pair["input_ids"]) for pair in pairs_of(make_dataset(), 1)}
    assert {source for batch in seen.seen for source, _ in batch} == expected


def test_sentinels_are_read_in_the_order_of_their_names():
    options = {"kind": "char", "show_progress": False}
    tokenizer = train_tokenizer(["abc"], additional_special_tokens=sentinel_tokens(12), **options)
    assert tokenizer.convert_ids_to_tokens(sentinel_ids_of(tokenizer)) == list(sentinel_tokens(12))
    falling = train_tokenizer(["abc"], additional_special_tokens=sentinel_tokens(12)[::-1], **options)
    ids = sentinel_ids_of(falling)
    assert list(ids) == sorted(ids, reverse=True) and len(ids) == 12
    assert sentinel_ids_of(train_tokenizer(["abc"], **options)) == ()


TEXTS = ["It rains. Does it? It does!", "The cat is black, and so on."] * 5


def tokenizer_with(*tokens, **options):
    return train_tokenizer(TEXTS, kind="char", additional_special_tokens=tokens, show_progress=False, **options)


def test_objectives_take_their_tokens_from_the_tokenizer():
    spans = make_objective("span_corruption", tokenizer_with(*objective_tokens("span_corruption")), 0.5, 8.0, True)
    assert len(spans.sentinel_ids) == 100
    assert (spans.noise_density, spans.mean_span_length, spans.spans_anywhere) == (0.5, 8.0, True)
    tokenizer = tokenizer_with(*objective_tokens("ul2", 5))
    mixture = make_objective("ul2", tokenizer, spans_anywhere=True)
    assert mixture.mode_token_ids == {mode: tokenizer.convert_tokens_to_ids(f"[{mode}]") for mode in "RSX"}
    assert len(mixture.denoisers[0][1].sentinel_ids) == 5 and mixture.denoisers[0][1].spans_anywhere
    tokenizer = tokenizer_with(*objective_tokens("text_infilling"))
    infilling = make_objective("text_infilling", tokenizer, noise_density=0.2)
    assert tokenizer.convert_ids_to_tokens(infilling.mask_token_id) == "<mask>" and infilling.noise_density == 0.2
    assert sorted(tokenizer.convert_ids_to_tokens(list(infilling.full_stop_ids))) == ["!", ".", "?"]
    assert infilling.eos_token_id == tokenizer.eos_token_id
    defaults = make_objective("span_corruption", tokenizer_with(*objective_tokens("span_corruption")))
    assert (defaults.noise_density, defaults.mean_span_length, defaults.spans_anywhere) == (0.15, 3.0, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("span_corruption", "must have <extra_id_0> and further ones for `objective` span_corruption, got none"),
        ("text_infilling", "must have a mask token or <mask> for `objective` text_infilling, got neither"),
    ],
)
def test_objectives_without_their_tokens_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        make_objective(name, tokenizer_with())

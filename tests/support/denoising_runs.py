"""Helpers shared by several tests: denoising runs."""

import datasets
import numpy as np
from small_runs import QUIET
from tiny_models import tiny_model
from transformers import Seq2SeqTrainingArguments

from metaphrase.data.collators import PairCollator
from metaphrase.data.denoising.dataset import DenoisingDataset
from metaphrase.data.denoising.span_corruption import SpanCorruption
from metaphrase.data.denoising.text_infilling import TextInfilling
from metaphrase.data.denoising.ul2 import ul2_mixture
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
    """Remembers the batches of the loader."""

    def __init__(self):
        super().__init__(0)
        self.seen = []

    def __call__(self, pairs):
        self.seen.append([(tuple(pair["input_ids"]), tuple(pair["labels"])) for pair in pairs])
        return super().__call__(pairs)


def make_trainer(dataset, folder, collator=None, model=None, **options):
    settings = {"per_device_train_batch_size": 4, "save_strategy": "no", "learning_rate": 1e-3}
    settings |= {"dataloader_pin_memory": False}
    return MetaphraseTrainer(
        model=model or tiny_model(vocab_size=60, encoder_layers=1, decoder_layers=1),
        args=Seq2SeqTrainingArguments(output_dir=str(folder), **QUIET | settings | options),
        train_dataset=dataset,
        data_collator=collator or PairCollator(0),
    )

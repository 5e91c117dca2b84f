"""Tests that sentence-transformers, as it is, loads a run and an encoder alone, and trains them."""

import datasets
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tiny_generator import save_generator, tiny_generator

from metaphrase.modeling import MetaphraseEncoderModel

TEXTS = ["a small dog runs", "the cat sleeps", "a dog", "the small cat sees the dog"]


@pytest.fixture
def folder(tmp_path):
    return save_generator(tiny_generator(), tmp_path / "run")


def test_a_run_and_its_encoder_embed_alike(folder, tmp_path):
    generator = tiny_generator()
    expected = generator.embed(TEXTS)
    MetaphraseEncoderModel.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    generator.tokenizers.save_pretrained(tmp_path / "encoder")
    for path in (folder, tmp_path / "encoder"):
        model = SentenceTransformer(str(path), device="cpu")
        np.testing.assert_allclose(model.encode(TEXTS, show_progress_bar=False), expected, atol=1e-5)


def test_a_loss_of_the_library_trains(folder, tmp_path):
    model = SentenceTransformer(str(folder), device="cpu")
    before = model.encode(TEXTS, show_progress_bar=False, convert_to_tensor=True)
    pairs = datasets.Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]})
    fields = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True}
    arguments = SentenceTransformerTrainingArguments(tmp_path / "out", **fields, disable_tqdm=True, learning_rate=0.01)
    loss = MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss).train()
    after = model.encode(TEXTS, show_progress_bar=False, convert_to_tensor=True)
    assert not torch.allclose(before, after) and after.isfinite().all()
    model.save(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(loaded.encode(TEXTS, show_progress_bar=False), after.numpy(), atol=1e-5)

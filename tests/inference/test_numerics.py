"""Tests of sizes and types at the edge: batches of 1 and 64, padding alone, empty sources, and every type of weights."""

import random

import pytest
import torch
from tiny_generator import SOURCES, save_generator, tiny_generator
from tiny_models import DESIGNS, random_batch, tiny_model

from metaphrase.inference import Generator

DTYPES = ("float32", "bfloat16", "float16", "int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_generator(tiny_generator(layers=1), tmp_path_factory.mktemp("numerics") / "model")


def load(folder, dtype, batch_size):
    sizes = {"batch_size": batch_size, "max_tokens_per_batch": 10**6}
    return Generator.from_pretrained(folder, device="cpu", dtype=dtype, **sizes)


def make_texts(number):
    """Return different texts of 0 to 9 words."""
    rng, words = random.Random(3), " ".join(SOURCES).split()
    texts = [" ".join(rng.choice(words) for _ in range(rng.randrange(10))) for _ in range(number)]
    return ["", *texts[1:-1], ""]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sources_in_batches_are_as_alone(dtype, folder):
    texts, options = make_texts(40), {"num_beams": 2, "max_new_tokens": 5}
    batched, alone = (load(folder, dtype, size).generate_n_best(texts, **options) for size in (64, 1))
    batched, alone = ([targets[0] for targets in rows] for rows in (batched, alone))
    assert all(torch.isfinite(torch.tensor([target.score for target in rows])).all() for rows in (batched, alone))
    num_equal = sum(first.text == second.text for first, second in zip(batched, alone, strict=True))
    # Half precision rounds sums by the shape of a product, and two beams may be close.
    assert num_equal == 40 if dtype in ("float32", "int8") else num_equal >= 38
    assert {rows[index].text for rows in (batched, alone) for index in (0, -1)} == {""}


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("design", DESIGNS)
def test_a_row_of_padding_alone_is_finite_and_changes_no_other_row(design, attn_implementation):
    if design == "soft_caps":
        attn_implementation = "eager"
    model = tiny_model(attn_implementation=attn_implementation, **DESIGNS[design])
    inputs = random_batch(model.config, batch=3)
    with torch.no_grad():
        expected = model(**inputs).logits
        inputs["attention_mask"][1] = 0
        inputs["input_ids"][1] = model.config.pad_token_id
        output = model(**inputs, labels=torch.full((3, 5), -100))
    assert torch.isfinite(output.logits).all() and output.loss.item() == 0
    torch.testing.assert_close(output.logits[[0, 2]], expected[[0, 2]])

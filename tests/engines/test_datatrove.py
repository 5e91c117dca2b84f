"""The step of datatrove: targets in order."""

import pytest
from tiny_generator import SOURCES, tiny_generator

pytest.importorskip("datatrove")

from datatrove.data import Document

from metaphrase.engines.datatrove import GenerateStep


@pytest.mark.parametrize("num_targets", [1, 3])
def test_documents_keep_their_order_and_get_their_targets(cli_model, num_targets):
    documents = [Document(text, str(number)) for number, text in enumerate([*SOURCES, ""])]
    options = {"num_beams": 3, "num_return_sequences": num_targets}
    step = GenerateStep(cli_model, key="de", chunk_size=2, loading={"device": "cpu"}, **options)
    results = list(step(iter(documents)))
    assert results == documents and step.stats["documents"].total == 6
    rows = tiny_generator(kind="byte").generate_n_best([*SOURCES, ""], return_scores=False, **options)
    texts = [[item.text for item in row] for row in rows]
    expected = texts if num_targets > 1 else [row[0] for row in texts]
    assert [document.metadata["de"] for document in results] == expected

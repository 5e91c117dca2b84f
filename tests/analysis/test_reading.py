import numpy as np
import pytest
import torch
from subcommands import execute
from tiny_generator import save_generator, tiny_generator

from metaphrase.inference import Generator
from metaphrase.modeling import MetaphraseEncoderModel

TEXTS = ["a small dog runs", "the cat sleeps", "a dog", "the small cat sees the dog"]


def test_embeddings_are_means_over_tokens(tmp_path):
    generator = tiny_generator(kind="byte", batch_size=2)
    rows = generator.embed(TEXTS)
    for text, row in zip(TEXTS, rows, strict=True):
        ids = torch.tensor(generator.encode([text]))
        with torch.no_grad():
            output = generator.model.get_encoder()(ids).last_hidden_state[0]
        np.testing.assert_allclose(row, output.mean(dim=0), atol=1e-5)
    assert generator.embed([]).shape[0] == 0
    # The encoder alone is enough, and writes no texts.
    save_generator(generator, tmp_path / "model")
    encoder = MetaphraseEncoderModel.from_pretrained(tmp_path / "model")
    encoder.save_pretrained(tmp_path / "encoder")
    generator.tokenizers.save_pretrained(tmp_path / "encoder")
    alone = Generator.from_pretrained(tmp_path / "encoder")
    np.testing.assert_allclose(alone.embed(TEXTS), rows, atol=1e-5)
    with pytest.raises(ValueError, match="must have a decoder to write texts, got MetaphraseEncoderModel"):
        alone.generate(TEXTS)


@pytest.mark.parametrize(
    "choices", [["a", "b", "c"], ["a dog", "b", "the cat sees"]], ids=["one step", "whole targets"]
)
def test_probabilities_of_answers(choices):
    generator = tiny_generator(kind="byte", batch_size=2)
    rows = generator.choice_scores(TEXTS, choices)
    np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-6)
    for text, row in zip(TEXTS, rows, strict=True):
        scores = generator.score([text] * 3, choices)
        # The end of answers of one token does not count.
        totals = [score.log_probabilities[0] if max(map(len, choices)) == 1 else score.total for score in scores]
        np.testing.assert_allclose(row, torch.tensor(totals).softmax(dim=0), atol=1e-5)


@pytest.mark.parametrize("choices", ["ab", ["a"], ["a", "a"]])
def test_choices_must_be_several(choices):
    with pytest.raises(ValueError, match="`choices` must be two or more different answers"):
        tiny_generator(kind="byte").choice_scores(TEXTS, choices)


def test_subcommands_write_a_row_for_each_line(tmp_path, capsys):
    generator = tiny_generator(kind="byte")
    folder = save_generator(generator, tmp_path / "model")
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    words = [str(folder), "--input", str(tmp_path / "in.txt")]
    execute("classify", [*words, "--choices", "a", "b"])
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    expected = generator.choice_scores(TEXTS, ["a", "b"])
    assert [line[0] for line in lines] == ["ab"[row.argmax()] for row in expected]
    np.testing.assert_allclose([[*map(float, line[1:])] for line in lines], expected, atol=1e-5)
    execute("embed", [*words, "--output", str(tmp_path / "out.npy")])
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), generator.embed(TEXTS), atol=1e-5)
    with pytest.raises(ValueError, match=r"`output` must end in \.npy"):
        execute("embed", [*words, "--output", str(tmp_path / "out.txt")])

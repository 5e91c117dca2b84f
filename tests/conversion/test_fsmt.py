"""Parity of converted FSMT with transformers' own class, for variants drawn at random."""

import pytest
import torch
from converted_models import VARIANTS, bart_like, check_conversion, draw
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from metaphrase.conversion import convert


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_fsmt_equals_its_own_class(variant, tmp_path):
    rng = draw("fsmt", variant)
    sizes = {"src_vocab_size": rng.randint(29, 61), "tgt_vocab_size": rng.randint(29, 61)}
    is_tied = rng.random() < 0.3
    if is_tied:
        # Its class can tie all embeddings or none.
        sizes["src_vocab_size"] = sizes["tgt_vocab_size"]
    theirs = bart_like("fsmt", rng, tie_word_embeddings=is_tied, vocab_size=sizes["tgt_vocab_size"], **sizes)
    check_conversion(theirs, "fsmt", rng, tmp_path)


def test_a_checkpoint_without_the_decoders_embedding_has_it_as_its_projection(tmp_path):
    """As transformers 4 wrote it."""
    rng = draw("fsmt", 0)
    theirs = bart_like("fsmt", rng, tie_word_embeddings=False, vocab_size=37, src_vocab_size=37, tgt_vocab_size=37)
    with torch.no_grad():
        theirs.model.decoder.embed_tokens.weight.copy_(theirs.model.decoder.output_projection.weight)
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "whole")
    path = tmp_path / "theirs" / "model.safetensors"
    weights = load_file(path)
    del weights["model.decoder.embed_tokens.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    convert(tmp_path / "theirs", tmp_path / "part")
    whole, part = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).eval() for name in ("whole", "part"))
    ids = torch.arange(4, 12)[None]
    with torch.inference_mode():
        expected, found = (model(input_ids=ids, decoder_input_ids=ids).logits for model in (whole, part))
    assert torch.equal(found, expected)
    assert not torch.equal(whole.get_input_embeddings().weight, whole.get_decoder().get_input_embeddings().weight)

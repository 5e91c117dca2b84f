"""Parity of converted FSMT with transformers' own class, for variants drawn at random."""

import pytest
from converted_models import VARIANTS, bart_like, check_conversion, draw


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

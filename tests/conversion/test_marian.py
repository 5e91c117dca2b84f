"""Parity of converted Marian and Pegasus with transformers' own classes, for variants drawn at random."""

import pytest
from converted_models import VARIANTS, bart_like, check_conversion, draw


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_marian_equals_its_own_class(variant, tmp_path):
    rng = draw("marian", variant)
    sizes = {"vocab_size": rng.randint(29, 61)}
    is_shared = rng.random() < 0.5
    if not is_shared:
        sizes["decoder_vocab_size"] = rng.randint(29, 61)
    last = min(sizes.values()) - 1
    ids = {"pad_token_id": last, "decoder_start_token_id": last, "eos_token_id": 0, "forced_eos_token_id": 0}
    if is_shared:
        # Their class would have three embeddings then, and a fourth that nothing reads.
        ids["tie_word_embeddings"] = True
    theirs = bart_like("marian", rng, share_encoder_decoder_embeddings=is_shared, **sizes, **ids)
    check_conversion(theirs, "marian", rng, tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_pegasus_equals_its_own_class(variant, tmp_path):
    rng = draw("pegasus", variant)
    check_conversion(bart_like("pegasus", rng), "pegasus", rng, tmp_path)

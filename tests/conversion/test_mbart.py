"""Parity of converted mBART and PLBart with transformers' own classes, for variants drawn at random."""

import pytest
from converted_models import VARIANTS, bart_like, check_conversion, draw


@pytest.mark.parametrize("family", ["mbart", "plbart"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_mbart_equals_its_own_class(family, variant, tmp_path):
    rng = draw(family, variant)
    theirs = bart_like(family, rng, decoder_start_token_id=5)
    theirs.generation_config.forced_bos_token_id = rng.choice((None, 7))
    check_conversion(theirs, family, rng, tmp_path)

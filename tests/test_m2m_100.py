"""Parity of converted M2M100 with transformers' own class, for variants drawn at random."""

import pytest
from converted_models import VARIANTS, bart_like, check_conversion, draw


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_m2m_100_equals_its_own_class(variant, tmp_path):
    rng = draw("m2m_100", variant)
    theirs = bart_like("m2m_100", rng, pad_token_id=rng.choice((0, 1, 3)), bos_token_id=0, eos_token_id=2)
    theirs.generation_config.forced_bos_token_id = rng.choice((None, 7))
    check_conversion(theirs, "m2m_100", rng, tmp_path)

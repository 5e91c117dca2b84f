"""Parity of converted BART with transformers' own class, for variants drawn at random."""

import pytest
from converted_models import VARIANTS, bart_like, check_conversion, draw


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_bart_equals_its_own_class(variant, tmp_path):
    rng = draw("bart", variant)
    check_conversion(bart_like("bart", rng), "bart", rng, tmp_path)

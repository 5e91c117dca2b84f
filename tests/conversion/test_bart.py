"""Tests of `conversion.bart`: converted models equal transformers' own classes, for random variants."""

import pytest
from converted_models import VARIANTS, bart_like, check_conversion, draw


@pytest.mark.parametrize("family", ["bart", "mbart", "plbart"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_model_equals_its_own_class(family, variant, tmp_path):
    rng = draw(family, variant)
    theirs = bart_like(family, rng, **({} if family == "bart" else {"decoder_start_token_id": 5}))
    theirs.generation_config.forced_bos_token_id = rng.choice((None, 7))
    check_conversion(theirs, family, rng, tmp_path)

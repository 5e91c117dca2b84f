"""Parity of converted M2M100 with transformers' own class, for variants drawn at random."""

import json

import pytest
from converted_models import VARIANTS, bart_like, check_conversion, draw

from metaphrase.conversion import convert


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_m2m_100_equals_its_own_class(variant, tmp_path):
    rng = draw("m2m_100", variant)
    theirs = bart_like("m2m_100", rng, pad_token_id=rng.choice((0, 1, 3)), bos_token_id=0, eos_token_id=2)
    theirs.generation_config.forced_bos_token_id = rng.choice((None, 7))
    check_conversion(theirs, "m2m_100", rng, tmp_path)


@pytest.mark.parametrize("family", ["m2m_100", "fsmt"])
def test_decoder_that_starts_with_padding_is_refused(family, tmp_path):
    """fairseq gives padding no position, and the token behind it the first: nobody else counts so."""
    sizes = {"src_vocab_size": 31, "tgt_vocab_size": 37} if family == "fsmt" else {}
    ids = {"pad_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    bart_like(family, draw(family, 0), **ids, **sizes).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    for name in ("theirs", "ours"):
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"decoder_start_token_id": 1}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"`decoder_start_token_id` must not be `pad_token_id`.*got 1 for both"):
            convert(tmp_path / name, tmp_path / "output", to=None if name == "theirs" else family)

import pytest
from tiny_generator import tiny_pair

from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME, VocabularyMap, find_vocabulary_map


@pytest.mark.parametrize("is_joint", [True, False])
def test_map_permits_the_tokens_of_all_sources(is_joint, tmp_path):
    pair = tiny_pair(is_joint, kind="byte_bpe")
    made = VocabularyMap([9, 2, 1], {5: [7, 30], 6: [30, 12], 8: []})
    made.save(tmp_path / VOCABULARY_MAP_NAME, pair)
    for vocabulary_map in (made, VocabularyMap.from_pretrained(tmp_path, pair)):
        assert vocabulary_map.permitted([[5, 100, 2], [6, 8]]).tolist() == [1, 2, 7, 9, 12, 30]
        assert vocabulary_map.permitted([[100]]).tolist() == [1, 2, 9]
    first, second, *_ = (tmp_path / VOCABULARY_MAP_NAME).read_text(encoding="utf-8").split("\n")
    names = pair.target.convert_ids_to_tokens
    assert first == "\t" + " ".join(names([1, 2, 9]))
    assert second == pair.source.convert_ids_to_tokens(5) + "\t" + " ".join(names([7, 30]))


def test_mistakes(tmp_path):
    pair = tiny_pair(kind="byte_bpe")
    assert find_vocabulary_map(tmp_path) is None
    with pytest.raises(ValueError, match=r"`use_vmap` needs a model with vmap\.txt, got '.*' without\. Make"):
        VocabularyMap.from_pretrained(tmp_path, pair)
    (tmp_path / VOCABULARY_MAP_NAME).write_text("\ta b\nc\ta of_another_model\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"Line 2 of .*vmap\.txt must hold tokens .*, got 'of_another_model'"):
        VocabularyMap.from_pretrained(tmp_path, pair)
    # This tokenizer has a token for the space.
    with pytest.raises(ValueError, match=r"vmap\.txt needs tokens without white space, got ' '"):
        VocabularyMap([1], {}).save(tmp_path / VOCABULARY_MAP_NAME, tiny_pair())

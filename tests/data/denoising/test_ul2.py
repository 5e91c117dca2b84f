"""The mixture of denoisers: seven settings, equal shares, and the effect of each denoiser on a block."""

from collections import Counter

import numpy as np
import pytest

from metaphrase.data.denoising.dataset import longest_block
from metaphrase.data.denoising.objectives import PrefixLanguageModeling, mode_token_ids_of, ul2_mixture
from metaphrase.tokenization import train_tokenizer

END = 1
SENTINELS = tuple(range(999, 849, -1))
MODES = {"R": 11, "S": 12, "X": 13}


def generator(seed=0):
    return np.random.default_rng(seed)


def test_the_seven_denoisers_of_the_paper():
    mixture = ul2_mixture(SENTINELS, END, MODES)
    *spans, prefix = mixture.denoisers
    settings = {(mode, objective.mean_span_length, objective.noise_density) for mode, objective in spans}
    assert settings == {("R", 3, 0.15), ("R", 8, 0.15), ("X", 3, 0.5), ("X", 8, 0.5), ("X", 64, 0.15), ("X", 64, 0.5)}
    assert prefix == ("S", PrefixLanguageModeling(eos_token_id=END, sentinel_id=SENTINELS[0]))


def test_mode_tokens_stand_before_the_source_in_the_shares_of_their_denoisers():
    mixture, block = ul2_mixture(SENTINELS, END, MODES), np.arange(20, 276)
    seen = Counter()
    for seed in range(1400):
        source, target = mixture(block, generator(seed))
        seen[int(source[0])] += 1
        assert source[-1] == target[-1] == END
        limits = mixture.lengths(256)
        assert len(source) <= limits[0] and len(target) <= limits[1]
        hidden = 256 - sum(token in range(20, 276) for token in source.tolist())
        if source[0] == MODES["R"]:
            assert hidden == 38
        elif source[0] == MODES["X"]:
            assert hidden in (38, 128)
        assert sorted(token for token in [*source, *target] if 20 <= token < 276) == block.tolist()
    shares = {mode: seen[token] / 1400 for mode, token in MODES.items()}
    assert shares == {
        "R": pytest.approx(2 / 7, abs=0.06),
        "S": pytest.approx(1 / 7, abs=0.05),
        "X": pytest.approx(4 / 7, abs=0.07),
    }


def test_limits_are_reached_by_some_denoiser_and_exceeded_by_none():
    mixture = ul2_mixture(SENTINELS, END, MODES)
    longest = [0, 0]
    for seed in range(3000):
        sides = mixture(np.arange(20, 60), generator(seed))
        longest = [max(most, len(side)) for most, side in zip(longest, sides, strict=True)]
    assert tuple(longest) == mixture.lengths(40)


def test_prefix_and_suffix_make_up_the_block():
    objective, suffixes = PrefixLanguageModeling(eos_token_id=END, sentinel_id=99), []
    for seed in range(2000):
        block = np.arange(100, 140)
        source, target = (side.tolist() for side in objective(block, generator(seed)))
        assert source[-2:] == [99, END] and target[0] == 99 and target[-1] == END
        prefix, suffix = source[:-2], target[1:-1]
        assert prefix + suffix == block.tolist() and prefix and suffix
        suffixes.append(len(suffix))
    assert np.mean(suffixes) == pytest.approx(10, rel=0.03)
    assert set(suffixes) == set(range(1, 20))
    assert objective.lengths(40) == (41, 21)
    for length in (2, 3, 4):
        source, target = objective(np.arange(5, 5 + length), generator())
        assert len(source) >= 3 and len(target) >= 3 and len(source) + len(target) == length + 4


def test_blocks_for_a_length_are_safe_for_all_denoisers():
    mixture = ul2_mixture(SENTINELS, END, MODES)
    block_length = longest_block(mixture, 512, 512)
    # The S-denoiser may leave all but one token: sentinel, mode token and end come on top.
    assert block_length == 510
    assert mixture.lengths(block_length + 1)[0] == 513


def test_too_few_sentinels_are_refused_with_the_number_that_all_denoisers_need():
    for given in (10, 84):
        with pytest.raises(ValueError, match=rf"must hold at least 85 ids for blocks of 510 tokens .*, got {given}\. "):
            ul2_mixture(SENTINELS[:given], END).check_block_length(510)
    ul2_mixture(SENTINELS[:85], END).check_block_length(510)
    with pytest.raises(ValueError, match="at least 2 tokens to be corrupted, got 1"):
        ul2_mixture(SENTINELS, END).check_block_length(1)


@pytest.mark.parametrize("names", [["[R]", "[S]", "[X]"], ["[NLU]", "[S2S]", "[NLG]"]])
def test_mode_tokens_are_found_under_both_names(names):
    options = {"kind": "char", "show_progress": False}
    tokenizer = train_tokenizer(["abc"], additional_special_tokens=names, **options)
    ids = mode_token_ids_of(tokenizer)
    assert [tokenizer.convert_ids_to_tokens(ids[mode]) for mode in "RSX"] == names
    assert mode_token_ids_of(train_tokenizer(["abc"], **options)) is None
    some = train_tokenizer(["abc"], additional_special_tokens=names[:2], **options)
    with pytest.raises(ValueError, match="A tokenizer must have all of"):
        mode_token_ids_of(some)

import warnings

import numpy as np
import pytest
import torch
from figure_files import png_size

from metaphrase.hub_card import draw_attention_map
from metaphrase.hub_card.figures import DOTS_PER_INCH


def test_attention_map_grows_with_its_tokens_and_keeps_long_labels_whole(tmp_path):
    def draw(rows, columns, label="t", **options):
        weights = torch.eye(rows, columns, requires_grad=True)  # one scale, hence one width of the colour bar
        return png_size(draw_attention_map(weights, ["s"] * columns, [label] * rows, tmp_path / "map.png", **options))

    small, large = draw(5, 15), draw(8, 21)
    cell = 0.34 * DOTS_PER_INCH
    assert large[0] - small[0] == pytest.approx(6 * cell, abs=3) and large[1] > small[1]
    label = "a_rather_long_token_indeed"
    longer = draw(5, 15, label, title="Layer 1")
    assert longer[0] > small[0] + 8 * len(label) and longer[1] > small[1]


def test_attention_map_takes_any_token_without_a_warning(tmp_path):
    tokens = ["日本", "🙂", "$x$", "^_{", "a\nb", "", " ", r"$\frac$", "▁the", "\u200d"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = draw_attention_map(np.eye(10), tokens, tokens, tmp_path / "map.png", title=r"日本 $\frac$")
    assert min(png_size(path)) > 10 * 0.34 * DOTS_PER_INCH
    with pytest.raises(ValueError, match=r"got \(2, 3\) for 3 target and 2 source tokens"):
        draw_attention_map(np.ones((2, 3)) / 3, ["a", "b"], ["x", "y", "z"], tmp_path / "map.png")

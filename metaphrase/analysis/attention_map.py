"""Attention maps as PNG files, without a display."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.patches import Rectangle

from metaphrase.analysis.pages import spell_out
from metaphrase.hub_card.figures import BEST_COLOR, TEXT_COLOR, ignoring_missing_glyphs, save_figure

# Fonts for characters that matplotlib's DejaVu Sans lacks. Only installed ones are used.
FALLBACK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Hiragino Sans", "Microsoft YaHei")
FALLBACK_FONTS += ("Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji")


def _readable(token: str) -> str:
    """Spell out characters that a font cannot show. The result is never blank."""
    shown = spell_out(token, ("Cc", "Cf", "Zl", "Zp", "Cs"))
    return shown if shown.strip() else repr(shown)


def draw_attention_map(
    weights: Any,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    path: str | os.PathLike,
    title: str | None = None,
) -> Path:
    """Draw one sentence's attention weights as a heat map: source tokens on top, target tokens at the left.

    A frame marks the largest weight of each row. The picture grows with the number of tokens. A character that no installed
    font holds becomes an empty box.

    Args:
        weights: (target, source), from 0 to 1; an array or a tensor.
        source_tokens: One for each column.
        target_tokens: One for each row.
        path: The PNG file to write.
        title: A line above the picture.

    Raises:
        ValueError: If the shape does not fit the tokens, or there are too many tokens for one picture.
    """
    weights = np.asarray(weights.detach().float().cpu() if hasattr(weights, "detach") else weights, dtype=float)
    rows, columns = len(target_tokens), len(source_tokens)
    if weights.shape != (rows, columns) or weights.size == 0:
        raise ValueError(
            "`weights` must have the shape (target tokens, source tokens), at least one each, "
            f"got {weights.shape} for {rows} target and {columns} source tokens."
        )
    cell = float(np.clip(18 / max(rows, columns), 0.16, 0.34))  # inches
    width, height = columns * cell, rows * cell
    # The cells decide the size; saving with a tight box then adds what the labels need, so that none is cut off.
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    panel = figure.add_axes((0, 0, 1, 1))
    image = panel.imshow(weights, cmap="Blues", vmin=0, vmax=max(float(weights.max()), 1e-9), aspect="auto")
    # Without `parse_math=False` two dollar signs in a token would start a formula.
    installed = set(fontManager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
    plain = {"parse_math": False, "family": fonts, "color": TEXT_COLOR}
    labels = plain | {"fontsize": min(10.0, cell * 72 * 0.55)}
    panel.xaxis.tick_top()
    panel.xaxis.set_label_position("top")
    panel.set_xticks(range(columns), [_readable(token) for token in source_tokens], rotation=90, **labels)
    panel.set_yticks(range(rows), [_readable(token) for token in target_tokens], **labels)
    panel.set_xlabel("source", color=TEXT_COLOR)
    panel.set_ylabel("target", color=TEXT_COLOR)
    panel.set_xticks(np.arange(-0.5, columns), minor=True)
    panel.set_yticks(np.arange(-0.5, rows), minor=True)
    panel.grid(which="minor", color="white", linewidth=0.6)
    panel.tick_params(which="both", length=0, pad=3)
    for row, column in enumerate(weights.argmax(axis=1)):
        panel.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=BEST_COLOR, linewidth=1.2))
    note = "Frame: the largest weight of the row. The attention of a target token adds up to 1."
    panel.annotate(note, (0, 0), (0, -6), "axes fraction", "offset points", va="top", fontsize=8, color=TEXT_COLOR)
    bar_height = max(1.6, min(height, 4.0))
    bar = figure.add_axes((1 + 0.2 / width, 1 - bar_height / height, 0.14 / width, bar_height / height))
    figure.colorbar(image, cax=bar, label="attention weight").outline.set_visible(False)
    bar.yaxis.label.set_color(TEXT_COLOR)
    bar.tick_params(labelsize=8, length=2, colors=TEXT_COLOR)
    if title:
        # Above the longest token label.
        with ignoring_missing_glyphs():
            box = panel.get_tightbbox(figure.canvas.get_renderer()).transformed(figure.dpi_scale_trans.inverted())
        position = box.x0 / width, (box.y1 + 0.15) / height
        figure.text(*position, title, fontsize=12, fontweight="bold", **plain)
    return save_figure(figure, path, bbox_inches="tight", pad_inches=0.15)

"""Training curves as PNG files, without a display."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from metaphrase.storage.folders import file_in_one_step
from metaphrase.training.recipe.recipe import is_better_lower

# Uses matplotlib's object interface with one backend, and so leaves pyplot's global state alone.
DOTS_PER_INCH = 150
TRAIN_COLOR, EVAL_COLOR, SCORE_COLOR, BEST_COLOR, TEXT_COLOR = "#4477AA", "#CC6633", "#228855", "#AA3377", "#333333"
# In percent; the first one in the log is drawn.
SCORE_LABELS = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER", "rouge": "ROUGE-L"}
SCORE_LABELS |= {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
SCORE_LABELS |= {"exact_match": "exact match", "wer": "WER", "cer": "CER"}


def save_figure(figure: Figure, path: str | os.PathLike, **options) -> Path:
    """Write a picture as a PNG file in one step."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), file_in_one_step(path) as temporary:
        # A character that no font has becomes an empty box.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
        figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH, facecolor="white", **options)
    return path


def _series(log_history: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and finite values of one key. Of a step logged twice, as in a resumed run, the later value counts."""
    points = {entry["step"]: entry[key] for entry in log_history if key in entry and "step" in entry}
    finite = sorted((step, value) for step, value in points.items() if is_finite(value))
    steps, values = zip(*finite, strict=True) if finite else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def is_finite(value: Any) -> bool:
    """Return True for a finite number that is no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def draw_training_curve(
    log_history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike,
    title: str | None = None,
    label_smoothing: float = 0.0,
    metric: str | None = None,
) -> Path | None:
    """Draw training and evaluation loss against the step, with a logged score and the learning rate below.

    Args:
        log_history: Entries of a Trainer's state, with `step` and any of `loss`, `eval_loss`, `eval_bleu` and the like.
        label_smoothing: Label smoothing of the training loss. The evaluation loss has none.
        metric: Score that is drawn, or `loss`. It decides which step is marked as the best. By default the first score of
            `SCORE_LABELS` in the log.

    Returns:
        The path, or None without a picture if the log holds neither a loss nor a score.
    """
    keys = ("loss", "eval_loss", *(f"eval_{name}" for name in SCORE_LABELS))
    series = {key: points for key in keys if len((points := _series(log_history, key))[0])}
    if not series:
        return None
    losses = [key for key in keys[:2] if key in series]
    scores = [key for key in keys[2:] if key in series]
    score = f"eval_{metric}" if f"eval_{metric}" in scores else next(iter(scores), None)
    rate = _series(log_history, "learning_rate")
    has_rate = bool(len(rate[0]))
    ratios = [3] * bool(losses) + [2] * bool(scores) + [1] * has_rate
    figure = Figure(figsize=(8, 1.2 + sum(ratios)), layout="constrained")
    panels: Any = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    if losses:
        _draw_losses(panels[0], series, label_smoothing)
    if score is not None:
        style = {"color": SCORE_COLOR, "linewidth": 1.6, "marker": "o", "markersize": 4}
        panels[-1 - has_rate].plot(*series[score], **style)
        panels[-1 - has_rate].set_ylabel(f"{SCORE_LABELS[score.removeprefix('eval_')]} (%)")
    best_key = "eval_loss" if metric == "loss" or score is None else score
    if best_key in series:
        steps, values = series[best_key]
        name = best_key.removeprefix("eval_")
        index = int(np.argmin(values) if is_better_lower(name) else np.argmax(values))
        star = {"color": BEST_COLOR, "markersize": 13, "markeredgecolor": "white", "zorder": 5}
        label = f"best: {values[index]:.4g} {SCORE_LABELS.get(name, name)} at step {steps[index]:,.0f}"
        panels[0 if name == "loss" else -1 - has_rate].plot(steps[[index]], values[[index]], "*", label=label, **star)
    # Above the panel, to hide no point.
    position = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2, "borderaxespad": 0.3, "borderpad": 0}
    for panel in panels:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(**position, fontsize=9, labelcolor=TEXT_COLOR, frameon=False)
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color("#999999")
        panel.tick_params(colors=TEXT_COLOR, labelsize=9, color="#999999")
        panel.yaxis.label.set_color(TEXT_COLOR)
        panel.yaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3, steps=(1, 2, 5, 10)))
        panel.margins(x=0.02, y=0.08)
        if best_key in series:
            panel.axvline(steps[index], color=BEST_COLOR, linewidth=0.9, linestyle=(0, (3, 3)), zorder=1)
    bottom = panels[-1]
    if has_rate:
        bottom.plot(*rate, color=TEXT_COLOR, linewidth=1.6)
        bottom.set_ylabel("learning rate")
        bottom.set_ylim(bottom=0)
        bottom.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=(1, 2, 5, 10)))
        bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    # The panels share their steps, but training and scoring may end at different steps.
    bottom.set_xlim(0, 1.02 * max(panel.dataLim.x1 for panel in panels))
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, steps=(1, 2, 5, 10)))
    bottom.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    epochs = [entry["epoch"] for entry in log_history if is_finite(entry.get("epoch"))]
    passes = f" ({max(epochs):.3g} epochs in all)" if epochs else ""
    bottom.set_xlabel(f"optimizer steps{passes}", color=TEXT_COLOR)
    figure.align_ylabels(panels)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=TEXT_COLOR, parse_math=False)
    return save_figure(figure, path)


def _draw_losses(panel: Any, series: Mapping[str, tuple[np.ndarray, np.ndarray]], label_smoothing: float) -> None:
    # Smoothing raises the loss, so that the two curves do not compare.
    smoothed, plain = (f" (label smoothing {label_smoothing:g})", " (no smoothing)") if label_smoothing else ("", "")
    if "loss" in series:
        steps, values = series["loss"]
        half, label = len(values) // 80, f"training{smoothed}"
        if half:
            panel.plot(steps, values, color=TRAIN_COLOR, alpha=0.25, linewidth=0.8)
            windows = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
            values = np.array([window.mean() for window in windows])
            label = f"training, mean of {2 * half + 1} neighbouring logs{smoothed}"
        marker = "." if len(values) < 25 else None
        panel.plot(steps, values, color=TRAIN_COLOR, linewidth=1.8, marker=marker, label=label)
    if "eval_loss" in series:
        style = {"color": EVAL_COLOR, "linewidth": 1.6, "marker": "o", "markersize": 4}
        panel.plot(*series["eval_loss"], **style, label=f"evaluation{plain}")
    panel.set_ylabel("loss (nats per target token)")

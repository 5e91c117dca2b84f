"""Draw training curves and attention maps as PNG files, without a display."""

import contextlib
import math
import os
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from metaphrase.storage.folders import file_in_one_step

# Uses matplotlib's object interface with one backend, and so leaves pyplot's global state alone.
DOTS_PER_INCH = 150
TRAIN_COLOR, EVAL_COLOR, SCORE_COLOR, BEST_COLOR, TEXT_COLOR = "#4477AA", "#CC6633", "#228855", "#AA3377", "#333333"
LOWER_IS_BETTER = ("ter", "wer", "cer")
# In percent; the first one in the log is drawn.
SCORE_LABELS = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER", "rouge": "ROUGE-L"}
SCORE_LABELS |= {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
SCORE_LABELS |= {"exact_match": "exact match", "wer": "WER", "cer": "CER"}
# Fonts for characters that matplotlib's DejaVu Sans lacks. Only installed ones are used.
FALLBACK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Hiragino Sans", "Microsoft YaHei")
FALLBACK_FONTS += ("Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji")


def _installed_fonts() -> list[str]:
    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]


@contextlib.contextmanager
def _ignoring_missing_glyphs() -> Iterator[None]:
    """A character without font becomes an empty box. matplotlib would warn for each token."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
        yield


def _save(figure: Figure, path: str | os.PathLike, **options) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _ignoring_missing_glyphs(), file_in_one_step(path) as temporary:
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


def logged_score(log_history: Sequence[Mapping[str, Any]], metric: str | None = None) -> str | None:
    """Return `metric`, or else the first name in `SCORE_LABELS`, that was logged as `eval_<name>`; None if there is none."""
    names = [name for name in SCORE_LABELS if len(_series(log_history, f"eval_{name}")[0])]
    return metric if metric in names else next(iter(names), None)


def has_training_curve(log_history: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the log holds a loss or a score."""
    return any(len(_series(log_history, key)[0]) for key in ("loss", "eval_loss", *map("eval_{}".format, SCORE_LABELS)))


def best_entry(log_history: Sequence[Mapping[str, Any]], metric: str | None = None) -> tuple[str, float, float] | None:
    """Return (key, step, value) of the best evaluation: by `metric`, a score, or the loss; None without evaluations."""
    name = None if metric == "loss" else logged_score(log_history, metric)
    key = f"eval_{name}" if name else "eval_loss"
    steps, values = _series(log_history, key)
    if len(steps) == 0:
        return None
    index = int(np.argmin(values) if name is None or name in LOWER_IS_BETTER else np.argmax(values))
    return key, float(steps[index]), float(values[index])


def draw_training_curve(
    log_history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike,
    title: str | None = None,
    label_smoothing: float = 0.0,
    metric: str | None = None,
) -> Path:
    """Draw training and evaluation loss against the step, and a logged score below.

    Args:
        log_history: Entries of a Trainer's state, with `step` and any of `loss`, `eval_loss`, `eval_bleu` and the like. At least
            one must be there (`has_training_curve`).
        path: The PNG file to write.
        title: A line above the picture.
        label_smoothing: Label smoothing of the training loss. The evaluation loss has none.
        metric: Score that is drawn, or `loss`. It decides which step is marked as the best. By default the first score of
            `SCORE_LABELS` in the log.
    """
    score_name, best = logged_score(log_history, metric), best_entry(log_history, metric)
    has_loss = any(len(_series(log_history, key)[0]) for key in ("loss", "eval_loss"))
    ratios = [3] * has_loss + [2] * (score_name is not None)
    figure = Figure(figsize=(8, 1.2 + sum(ratios)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    if has_loss:
        _draw_losses(panels[0], log_history, label_smoothing)
    if score_name is not None:
        style = {"color": SCORE_COLOR, "linewidth": 1.6, "marker": "o", "markersize": 4}
        panels[-1].plot(*_series(log_history, f"eval_{score_name}"), **style)
        panels[-1].set_ylabel(f"{SCORE_LABELS[score_name]} (%)")
    if best is not None:
        key, step, value = best
        unit = "loss" if key == "eval_loss" else SCORE_LABELS[score_name]
        star = {"color": BEST_COLOR, "markersize": 13, "markeredgecolor": "white", "zorder": 5}
        label = f"best: {value:.4g} {unit} at step {step:,.0f}"
        panels[0 if key == "eval_loss" else -1].plot([step], [value], "*", label=label, **star)
    # Above the panel, to hide no point.
    position = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3, "borderaxespad": 0.3, "borderpad": 0}
    for panel in panels:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(**position, fontsize=9, labelcolor=TEXT_COLOR, frameon=False)
        _style(panel)
        panel.yaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3, steps=(1, 2, 5, 10)))
        panel.margins(x=0.02, y=0.08)
        if best is not None:
            panel.axvline(best[1], color=BEST_COLOR, linewidth=0.9, linestyle=(0, (3, 3)), zorder=1)
    bottom = panels[-1]
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
    return _save(figure, path)


def _draw_losses(panel, log_history: Sequence[Mapping[str, Any]], label_smoothing: float) -> None:
    # Smoothing raises the loss, so that the two curves do not compare.
    smoothed, plain = (f" (label smoothing {label_smoothing:g})", " (no smoothing)") if label_smoothing else ("", "")
    steps, values = _series(log_history, "loss")
    width = 2 * (len(values) // 80) + 1  # odd, so that a mean is centred on a step
    label = f"training{smoothed}"
    if width > 1:
        panel.plot(steps, values, color=TRAIN_COLOR, alpha=0.25, linewidth=0.8)
        half = width // 2
        values = [values[max(0, index - half) : index + half + 1].mean() for index in range(len(values))]
        label = f"training, mean of {width} neighbouring logs{smoothed}"
    if len(values):
        marker = "." if len(values) < 25 else None
        panel.plot(steps, values, color=TRAIN_COLOR, linewidth=1.8, marker=marker, label=label)
    steps, values = _series(log_history, "eval_loss")
    if len(values):
        panel.plot(steps, values, color=EVAL_COLOR, linewidth=1.6, marker="o", markersize=4, label=f"evaluation{plain}")
    panel.set_ylabel("loss (nats per target token)")


def _style(panel) -> None:
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#999999")
    panel.tick_params(colors=TEXT_COLOR, labelsize=9, color="#999999")
    panel.yaxis.label.set_color(TEXT_COLOR)


def spell_out(text: str, categories: Sequence[str]) -> str:
    """Write characters of some Unicode categories as escapes, such as a newline."""
    return "".join(
        mark.encode("unicode_escape").decode() if unicodedata.category(mark) in categories else mark for mark in text
    )


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
    plain = {"parse_math": False, "family": _installed_fonts(), "color": TEXT_COLOR}
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
        with _ignoring_missing_glyphs():
            box = panel.get_tightbbox(figure.canvas.get_renderer()).transformed(figure.dpi_scale_trans.inverted())
        position = box.x0 / width, (box.y1 + 0.15) / height
        figure.text(*position, title, fontsize=12, fontweight="bold", **plain)
    return _save(figure, path, bbox_inches="tight", pad_inches=0.15)


def draw_trials(
    rows: Sequence[Mapping[str, Any]],
    best: Mapping[str, Any],
    metric: str,
    path: str | os.PathLike,
    log_names: Sequence[str] = (),
) -> Path:
    """Draw the scores of a search: by trial, and against each searched field. Trials without a score are left out.

    Args:
        rows: Trials with `trial`, `state`, `seconds`, the score under the name of the metric, and the fields.
        best: The best of the rows.
        metric: Name of the score.
        path: The PNG file to write.
        log_names: Fields with a logarithmic axis.
    """
    rows = [row for row in rows if is_finite(row[metric])]
    names = ["trial", *(name for name in best if name not in ("trial", "state", "seconds", metric))]
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * lines + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    styles = {"complete": {"color": TRAIN_COLOR}, "pruned": {"color": "#999999", "facecolor": "none"}}
    for panel in grid.flat[len(names) :]:
        panel.set_visible(False)
    for name, panel in zip(names, grid.flat, strict=False):
        is_number = all(is_finite(row[name]) for row in rows)
        for state, style in styles.items():
            points = [
                (row[name] if is_number else str(row[name]), row[metric]) for row in rows if row["state"] == state
            ]
            panel.scatter(*zip(*points, strict=True) if points else ([], []), s=26, label=state, zorder=3, **style)
        star = {"marker": "*", "s": 150, "color": BEST_COLOR, "edgecolor": "white", "label": "best", "zorder": 5}
        panel.scatter([best[name] if is_number else str(best[name])], [best[metric]], **star)
        panel.set_xlabel(name, color=TEXT_COLOR, fontsize=9)
        if name in log_names:
            panel.set_xscale("log")
        elif is_number and len(numbers := {row[name] for row in rows}) <= 4:
            panel.set_xticks(sorted(numbers))
        elif is_number:
            panel.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=(1, 2, 5, 10), integer=name == "trial"))
        panel.margins(x=0.08 if is_number else 0.25)
        _style(panel)
    for panel in grid[:, 0]:
        panel.set_ylabel(SCORE_LABELS.get(metric, metric), color=TEXT_COLOR, fontsize=9)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=9, frameon=False)
    return _save(figure, path)

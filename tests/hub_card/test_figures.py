"""Tests of `metaphrase.hub_card.figures`: curves of training and maps of attention."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from figure_files import LOG, png_size

from metaphrase.hub_card import figures
from metaphrase.hub_card.figures import best_entry, draw_attention_map, draw_training_curve, draw_trials


def test_training_curve_shows_all_steps_whatever_the_last_one_with_a_score(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path, **options: drawn.append(figure) or path)
    unscored = [{"step": step, "loss": 1.0} for step in (40, 50)]
    draw_training_curve([*LOG, *unscored], tmp_path / "curve.png")
    draw_training_curve([*LOG, {"step": 60, "eval_bleu": 9.5}], tmp_path / "curve.png")
    limits = [[panel.get_xlim() for panel in figure.axes] for figure in drawn]
    assert limits == [[(0, pytest.approx(51))] * 2, [(0, pytest.approx(61.2))] * 2]


@pytest.mark.parametrize(
    ("smoothing", "notes"), [(0.0, ("", "")), (0.1, (" (label smoothing 0.1)", " (no smoothing)"))]
)
def test_training_curve_tells_a_smoothed_loss_from_a_plain_one(smoothing, notes, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path, **options: drawn.append(figure) or path)
    draw_training_curve(LOG, tmp_path / "curve.png", label_smoothing=smoothing)
    labels = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert labels[:2] == [f"training{notes[0]}", f"evaluation{notes[1]}"]


def test_best_entry_follows_the_score_and_its_direction():
    assert best_entry(LOG) == ("eval_bleu", 20, 9)
    assert best_entry([{"step": 1, "eval_wer": 9.0}, {"step": 2, "eval_wer": 4.0}]) == ("eval_wer", 2, 4)
    assert best_entry([{"step": 1, "eval_loss": 2.0}, {"step": 2, "eval_loss": 3.0}]) == ("eval_loss", 1, 2)
    assert best_entry([{"step": 1, "eval_bleu": float("nan")}, {"step": 1, "loss": 2.0}]) is None


@pytest.mark.parametrize(
    ("metric", "panel", "label"), [("wer", 1, "4 WER at step 20"), ("loss", 0, "5 loss at step 30")]
)
def test_the_best_step_is_that_of_the_metric_for_the_best_model(metric, panel, label, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path, **options: drawn.append(figure) or path)
    log = [*LOG, {"step": 10, "eval_bleu": 10.0}]
    log += [{"step": step, "eval_wer": wer} for step, wer in ((10, 6.0), (20, 4.0), (30, 5.0))]
    draw_training_curve(log, tmp_path / "curve.png", metric=metric)
    labels = [axes.get_legend_handles_labels()[1] for axes in drawn[0].axes]
    stars = [(index, text) for index, texts in enumerate(labels) for text in texts if text.startswith("best")]
    assert stars == [(panel, f"best: {label}")]


def test_what_a_resumed_run_logs_twice_counts_once():
    log = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": None}]
    steps, values = figures._series(log, "loss")
    assert (steps.tolist(), values.tolist()) == ([1, 2], [5, 3])


@pytest.mark.parametrize("log", [[], [{"step": 1, "learning_rate": 0.1}], [{"step": 1, "loss": float("nan")}]])
def test_a_log_without_values_is_refused(log, tmp_path):
    with pytest.raises(ValueError, match="`log_history` must hold an entry"):
        draw_training_curve(log, tmp_path / "curve.png")


def test_a_long_noisy_log_is_drawn(tmp_path):
    noise = np.random.default_rng(0).normal(3, 0.1, 400)
    log = [{"step": step, "loss": float(loss)} for step, loss in enumerate(noise)]
    assert png_size(draw_training_curve(log, tmp_path / "curve.png"))[0] == 8 * figures.DOTS_PER_INCH


def test_trials_are_drawn_against_each_field(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.append(figure) or path)
    columns = ("trial", "state", "bleu", "seconds", "learning_rate", "optim")
    table = [(0, "complete", 9.0, 1.0, 1e-3, "adamw_torch"), (1, "pruned", 2.0, 1.0, 1e-2, "adafactor")]
    table += [(2, "fail", None, None, None, None), (3, "complete", 12.0, 1.0, 3e-3, "adafactor")]
    rows = [dict(zip(columns, values, strict=True)) for values in table]
    draw_trials(rows, rows[3], "bleu", tmp_path / "trials.png", log_names=["learning_rate"])
    panels = drawn[0].axes
    assert [panel.get_xlabel() for panel in panels] == ["trial", "learning_rate", "optim"]
    assert [panel.get_xscale() for panel in panels] == ["linear", "log", "linear"]
    complete, pruned, best = panels[1].collections
    assert complete.get_offsets().tolist() == [[1e-3, 9.0], [3e-3, 12.0]]
    assert pruned.get_offsets().tolist() == [[1e-2, 2.0]] and best.get_offsets().tolist() == [[3e-3, 12.0]]


def test_attention_map_grows_with_its_tokens(tmp_path):
    def draw(rows, columns):
        weights = torch.eye(rows, columns, requires_grad=True)  # one scale, hence one width of the colour bar
        return png_size(draw_attention_map(weights, ["s"] * columns, ["t"] * rows, tmp_path / "map.png"))

    square, wide, tall = draw(15, 15), draw(15, 30), draw(30, 15)
    cell = 0.34 * figures.DOTS_PER_INCH
    assert wide[0] - square[0] == pytest.approx(15 * cell, abs=3) and wide[1] == pytest.approx(square[1], abs=3)
    assert tall[1] - square[1] == pytest.approx(15 * cell, abs=3) and tall[0] == pytest.approx(square[0], abs=3)


def test_attention_map_keeps_long_labels_whole(tmp_path):
    weights = np.eye(2)
    short = png_size(draw_attention_map(weights, ["a", "b"], ["c", "d"], tmp_path / "short.png"))
    label = "a_rather_long_token_indeed"
    longer = png_size(draw_attention_map(weights, ["a", "b"], [label, "d"], tmp_path / "long.png", title="Layer 1"))
    assert longer[0] > short[0] + 8 * len(label) and longer[1] > short[1]


def test_attention_map_takes_any_token_without_a_warning(tmp_path):
    tokens = ["日本", "🙂", "$x$", "^_{", "a\nb", "", " ", r"$\frac$", "▁the", "\u200d"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = draw_attention_map(np.eye(10), tokens, tokens, tmp_path / "map.png", title=r"日本 $\frac$")
    assert min(png_size(path)) > 10 * 0.34 * figures.DOTS_PER_INCH
    assert [figures._readable(token) for token in tokens[4:7]] == ["a\\nb", "''", "' '"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((2, 3)) / 3, r"got \(2, 3\) for 3 target and 2 source tokens"),
        (np.full((3, 2), 2.0), "must lie between 0 and 1"),
        (np.full((3, 2), np.nan), "must lie between 0 and 1"),
    ],
)
def test_unfit_attention_weights_are_refused(weights, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        draw_attention_map(weights, ["a", "b"], ["x", "y", "z"], tmp_path / "map.png")


def test_an_attention_map_too_large_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at most 1250 tokens a side, got 2000 and 1"):
        draw_attention_map(np.full((1, 2000), 0.0005), ["s"] * 2000, ["t"], tmp_path / "map.png")


def test_figures_leave_pyplot_alone(tmp_path):
    program = (
        "import sys; from metaphrase.hub_card.figures import draw_training_curve\n"
        f"draw_training_curve([{{'step': 1, 'loss': 2.0}}], {str(tmp_path / 'curve.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

import numpy as np
import pytest
from figure_files import LOG

from metaphrase.hub_card import figures
from metaphrase.hub_card.figures import draw_training_curve


@pytest.fixture
def drawn(monkeypatch):
    figures_drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path, **options: figures_drawn.append(figure) or path)
    return figures_drawn


@pytest.mark.parametrize(
    ("smoothing", "notes"), [(0.0, ("", "")), (0.1, (" (label smoothing 0.1)", " (no smoothing)"))]
)
def test_training_curve_tells_a_smoothed_loss_from_a_plain_one(smoothing, notes, drawn):
    draw_training_curve(LOG, "curve.png", label_smoothing=smoothing)
    labels = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert labels[:2] == [f"training{notes[0]}", f"evaluation{notes[1]}"]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (LOG, "9 BLEU at step 20"),
        ([{"step": 1, "eval_wer": 9.0}, {"step": 2, "eval_wer": 4.0}], "4 WER at step 2"),
        ([{"step": 1, "eval_loss": 2.0}, {"step": 2, "eval_loss": 3.0}], "2 loss at step 1"),
        ([{"step": 1, "eval_bleu": float("nan")}, {"step": 1, "loss": 2.0}], None),
        # A resumed run may log a step twice. Only its last entry counts.
        ([{"step": 1, "eval_loss": value} for value in (2.0, 3.0)], "3 loss at step 1"),
    ],
)
def test_the_best_step_follows_the_score_and_its_direction(log, expected, drawn):
    draw_training_curve(log, "curve.png")
    labels = [text for axes in drawn[0].axes for text in axes.get_legend_handles_labels()[1]]
    assert [text for text in labels if text.startswith("best")] == [f"best: {expected}"] * bool(expected)


def test_a_log_without_a_loss_or_score_has_no_curve(drawn):
    assert draw_training_curve([{"step": 1, "epoch": 1.0}], "curve.png") is None and not drawn


@pytest.mark.parametrize(
    ("metric", "panel", "label"), [("wer", 1, "4 WER at step 20"), ("loss", 0, "5 loss at step 30")]
)
def test_the_best_step_is_that_of_the_metric_for_the_best_model(metric, panel, label, drawn):
    log = [*LOG, {"step": 10, "eval_bleu": 10.0}]
    log += [{"step": step, "eval_wer": wer} for step, wer in ((10, 6.0), (20, 4.0), (30, 5.0))]
    draw_training_curve(log, "curve.png", metric=metric)
    labels = [axes.get_legend_handles_labels()[1] for axes in drawn[0].axes]
    stars = [(index, text) for index, texts in enumerate(labels) for text in texts if text.startswith("best")]
    assert stars == [(panel, f"best: {label}")]


def test_a_long_noisy_log_has_its_mean(drawn):
    noise = np.random.default_rng(0).normal(3, 0.1, 400)
    draw_training_curve([{"step": step, "loss": float(loss)} for step, loss in enumerate(noise)], "curve.png")
    [panel] = drawn[0].axes
    assert panel.get_legend().get_texts()[0].get_text() == "training, mean of 11 neighbouring logs"
    assert panel.lines[1].get_ydata()[200] == pytest.approx(noise[195:206].mean())

"""Tests of training and decoding by Ray, on one machine with two processes."""

import os
import re
import signal
import sys
import tempfile

import pytest
from launched_runs import assert_same_weights, words_of
from small_experiments import read_log
from source_files import ROOT

from metaphrase.inference import Generator
from metaphrase.training.recipe.recipe import load_recipe

# Ray warns of its own names.
pytestmark = pytest.mark.filterwarnings("default")


def test_the_error_without_ray_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "metaphrase.scripts.ray_training", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"Ray is not installed: pip install metaphrase\[ray\]"):
        import metaphrase.scripts.ray_training  # noqa: F401


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    ray = pytest.importorskip("ray", reason="needs `pip install .[ray]`")
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray_") as short:
        # Ray writes a token to the home folder.
        for name, value in {"HOME": home, "RAY_USAGE_STATS_ENABLED": 0, "CUDA_VISIBLE_DEVICES": ""}.items():
            patch.setenv(name, str(value))
        # Ray takes 127.0.0.1 for an address of the network. Names of sockets must be short.
        options = {"_node_ip_address": "127.0.0.2", "_temp_dir": short, "object_store_memory": 200 * 2**20}
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, **options)
        yield ray
        ray.shutdown()


@pytest.fixture
def fit(ray, corpus_folder, tmp_path):
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from metaphrase.scripts import ray_training

    def fit():
        recipe = load_recipe(None, words_of(corpus_folder, tmp_path / "run"))
        run = RunConfig(storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=1))
        return ray_training.make_ray_trainer(recipe, ScalingConfig(num_workers=2), run).fit()

    return fit


@pytest.mark.slow
def test_ray_trains_as_torchrun(fit, reference, tmp_path):
    result = fit()
    assert_same_weights(tmp_path / "run", reference)
    [log] = [entry for entry in read_log(reference) if entry["step"] == 6]
    assert result.metrics["eval_loss"] == pytest.approx(log["eval_loss"], abs=1e-4)
    assert "bleu" in result.return_value["scores"]
    # Ray's copies are whole checkpoints.
    with result.checkpoint.as_directory() as folder:
        assert_same_weights(tmp_path / "run" / "checkpoint-6", tmp_path.__class__(folder) / "checkpoint")
    assert len(result.best_checkpoints) == 2
    with pytest.raises(ValueError, match="`output_dir` must not hold a model, a checkpoint"):
        fit()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the first checkpoint", "before Ray knows the first checkpoint"])
def test_a_killed_worker_goes_on_to_the_same_weights(moment, fit, reference, tmp_path, monkeypatch):
    from metaphrase.scripts import ray_training

    mark, event = tmp_path / "mark", "on_step_begin" if "Ray" not in moment else "on_save"

    # Ray pickles a local function whole, while workers import that of a module.
    def train_once_killed(values):
        from metaphrase.scripts import ray_training

        whole = getattr(ray_training.ReportCallback, event)

        def kill(self, args, state, control, **kwargs):
            if not state.is_world_process_zero and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(self, args, state, control, **kwargs)

        setattr(ray_training.ReportCallback, event, kill)
        return ray_training.train_on_worker(values)

    monkeypatch.setattr(ray_training, "train_on_worker", train_once_killed)
    assert fit().metrics["step"] == 6 and mark.exists()
    assert_same_weights(tmp_path / "run", reference)


@pytest.mark.slow
def test_the_class_of_the_page_decodes_as_the_generator(ray, cli_model, tmp_path, monkeypatch):
    import pandas

    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    [code] = [text for text in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "map_batches" in text]
    texts = [f"the {word} sleeps" for word in ("cat", "dog", "bird") for _ in range(4)] + ["", "a dog and a cat sleep"]
    (tmp_path / "input.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    changes = {
        "runs/demo": cli_model,
        "input.txt": str(tmp_path / "input.txt"),
        '"targets"': repr(str(tmp_path / "targets")),
    }
    changes |= {
        "4096": "5",
        '"num_gpus": 1': '"num_cpus": 0.5',
        '"num_beams": 4': '"num_beams": 2, "max_new_tokens": 8',
    }
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    exec(compile(code, "page", "exec"), {"__name__": "page"})
    written = pandas.concat(map(pandas.read_parquet, sorted((tmp_path / "targets").glob("*.parquet"))))
    expected = Generator.from_pretrained(cli_model).generate(texts, num_beams=2, max_new_tokens=8)
    assert sorted(zip(written["text"], written["target"], strict=True)) == sorted(zip(texts, expected, strict=True))

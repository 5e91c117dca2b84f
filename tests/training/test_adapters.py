import json
import sys

import pytest
import small_trainers
import torch
from safetensors.torch import load_file
from tiny_models import DESIGNS, random_batch, tiny_model
from transformers import AutoModelForSeq2SeqLM

from metaphrase.data.collators import PairCollator
from metaphrase.techniques.partial_training import add_lora
from metaphrase.training.distributed import is_adapted
from metaphrase.training.experiment import Experiment, merge_lora
from metaphrase.training.recipe.recipe import Recipe
from metaphrase.training.training_loss import TrainingLoss

pytest.importorskip("peft")
PAIRS = small_trainers.pairs_of_eight_lengths()


def moved_lora(model):
    adapted = add_lora(model, rank=4)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted.eval()


def make_trainer(model, folder, **options):
    settings = {"max_steps": 4, "learning_rate": 0.1, "lr_scheduler_type": "constant", "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 2, "predict_with_generate": False}
    return small_trainers.make_trainer(model, PAIRS, folder, **settings | options)


def adapter_weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def test_adapter_says_nothing_at_first_and_is_all_that_is_trained():
    batch = random_batch(tiny_model().config)
    expected = tiny_model()(**batch).logits
    adapted = add_lora(tiny_model(), rank=3, alpha=5, dropout=0.2).eval()
    torch.testing.assert_close(adapted(**batch).logits, expected)
    names = adapter_weights(adapted)
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {tuple(weight.shape) for name, weight in names.items() if "lora_A" in name} <= {(3, 32), (3, 48), (3, 40)}
    assert is_adapted(adapted) and not is_adapted(tiny_model())
    config = adapted.peft_config["default"]
    assert (config.lora_alpha, config.lora_dropout) == (5, 0.2)


@pytest.mark.parametrize(("targets", "count"), [(["q_proj", "v_proj"], 2 * 2 * 3), (["cross_attn.q_proj"], 2)])
def test_layers_can_be_chosen(targets, count):
    assert len(adapter_weights(add_lora(tiny_model(), target_modules=targets))) == 2 * count
    for target in ("qproj", "embed_tokens", "lm_head"):
        with pytest.raises(ValueError, match=f"`lora_target_modules` .*{target}"):
            add_lora(tiny_model(), target_modules=["q_proj", target])


def test_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("metaphrase.training.experiment.is_peft_available", lambda: False)
    fields = {"model_name_or_path": str(tmp_path), "output_dir": str(tmp_path / "run")}
    with pytest.raises(ImportError, match=r"needs peft, which is not installed: pip install metaphrase\[lora\]"):
        Experiment(Recipe(train_file="a", lora_rank=2, **fields))


def test_evaluation_of_an_adapted_model(tmp_path):
    decoded = []
    model = moved_lora(tiny_model())
    options = {"predict_with_generate": True, "per_device_eval_batch_size": 2, "generation_max_length": 8}
    trainer = make_trainer(model, tmp_path, score=lambda ids, labels: decoded.extend(ids) or {"bleu": 1.0}, **options)
    trainer.generation_options = {"max_new_tokens": 6, "num_beams": 2}
    metrics = trainer.evaluate()
    assert metrics["eval_bleu"] == 1.0
    batch = PairCollator(0)(PAIRS)
    assert metrics["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-4)
    trainer.label_smoothing = 0.2
    loss = trainer.compute_loss(model.train(), dict(batch))
    expected = model(**batch, loss_of_states=TrainingLoss(0.2)).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    merged = merge_lora(model, tmp_path / "merged").eval()
    for pair, ids in zip(PAIRS, decoded, strict=True):
        alone = merged.generate(torch.tensor([pair["input_ids"]]), max_new_tokens=6, num_beams=2)[0, 1:].tolist()
        assert ids == alone[: len(ids)] and len(ids) == (alone.index(2) + 1 if 2 in alone else len(alone))


def test_a_checkpoint_holds_the_adapter_alone_and_the_best_comes_back(tmp_path):
    tiny_model(initializer_range=0.2).save_pretrained(tmp_path / "base")

    def fine_tune(folder, resume=None):
        model = add_lora(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), rank=4, dropout=0.1)
        options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        trainer = make_trainer(model, folder, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = fine_tune(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["adapter_model.safetensors"]
    saved = load_file(f"{whole.state.best_model_checkpoint}/adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    trained = {name.replace(".default", ""): weight for name, weight in adapter_weights(whole.model).items()}
    assert trained.keys() == saved.keys() and all(torch.equal(trained[name], saved[name]) for name in saved)
    assert whole.evaluate()["eval_loss"] == pytest.approx(whole.state.best_metric, rel=1e-5)
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    fine_tune(tmp_path / "resumed", str(checkpoint))
    last = [load_file(tmp_path / run / "checkpoint-4" / "adapter_model.safetensors") for run in ("run", "resumed")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.parametrize("design", DESIGNS)
def test_merged_model_says_what_the_adapted_one_said(design, tmp_path, monkeypatch):
    model = tiny_model(**DESIGNS[design])
    names = set(model.state_dict())
    batch = random_batch(model.config)
    before = model(**batch).logits
    adapted = moved_lora(model)
    expected = adapted(**batch).logits
    options = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    generated = adapted.generate(**inputs, **options)
    assert (expected - before).abs().max() > 1e-2
    assert all(parameter.requires_grad for parameter in merge_lora(adapted, tmp_path).parameters())
    monkeypatch.setitem(sys.modules, "peft", None)
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert type(merged) is type(model) and set(merged.state_dict()) == names
    scale = expected.abs().max().item()
    torch.testing.assert_close(merged(**batch).logits, expected, atol=1e-5 * max(scale, 1), rtol=1e-5)
    assert torch.equal(merged.generate(**inputs, **options), generated)

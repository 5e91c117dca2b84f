"""LoRA: what is trained, evaluated and saved, that accumulation stays exact, and that merging changes nothing that is said."""

import json
import sys

import pytest
import small_trainers
import torch
from safetensors.torch import load_file
from tiny_generator import SOURCES, tiny_pair
from tiny_models import DESIGNS, random_batch, tiny_model
from transformers import AutoModelForSeq2SeqLM

from metaphrase.data.collators import PairCollator
from metaphrase.inference import Generator
from metaphrase.training.adapters import add_lora, is_adapted, load_lora, merge_lora

peft = pytest.importorskip("peft")
UNTIED = {"decoder_vocab_size": 31, "share_embeddings": False, "tie_word_embeddings": False}
_GENERATOR = torch.Generator().manual_seed(1)
_ROWS = [torch.randint(3, 20, (2, length), generator=_GENERATOR).tolist() for length in (8, 1, 5, 2, 7, 3, 3, 6)]
PAIRS = [{"input_ids": [*source, 2], "labels": [*target, 2]} for source, target in _ROWS]


def moved_lora(model, rank=4, seed=7, **options):
    """An adapter that changes what the model says."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = add_lora(model, rank=rank, **options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted.eval()


def make_trainer(model, folder, **options):
    settings = {"max_steps": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant", "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 8, "predict_with_generate": False}
    return small_trainers.make_trainer(model, PAIRS, folder, **settings | options)


def adapter_weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def base_weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_" not in name}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# Adapted weights


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


@pytest.mark.parametrize(
    ("targets", "count"),
    [(["q_proj", "v_proj"], 2 * 2 * 3), (["cross_attn.q_proj"], 2), (r".*encoder.*\.mlp\..*_proj", 6)],
)
def test_layers_can_be_chosen(targets, count):
    assert len(adapter_weights(add_lora(tiny_model(), target_modules=targets))) == 2 * count


def test_what_cannot_be_adapted_is_refused():
    for target in ("qproj", "embed_tokens", "lm_head"):
        model = tiny_model()
        with pytest.raises(ValueError, match=f"`target_modules` .*{target}"):
            add_lora(model, target_modules=["q_proj", target])
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    for call in (lambda: add_lora(tiny_model()), lambda: load_lora("x"), lambda: merge_lora("x", "y")):
        with pytest.raises(ImportError, match=r"needs peft, which is not installed: pip install metaphrase\[lora\]"):
            call()


# Training


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
    loss, expected = trainer.compute_loss(model.train(), dict(batch)), model(**batch, smoothing=0.2).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    merged = merge_lora(model, tmp_path / "merged").eval()
    for pair, ids in zip(PAIRS, decoded, strict=True):
        alone = merged.generate(torch.tensor([pair["input_ids"]]), max_new_tokens=6, num_beams=2)[0, 1:].tolist()
        assert ids == alone[: len(ids)] and len(ids) == (alone.index(2) + 1 if 2 in alone else len(alone))


@pytest.fixture
def base_folder(tmp_path):
    """A model with tokenizers in a folder, as one to fine-tune lies there."""
    pair = tiny_pair()
    model = tiny_model(initializer_range=0.2, **pair.config_fields())
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "base")
    pair.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def fine_tune(base_folder, folder, resume=None, **options):
    model = add_lora(AutoModelForSeq2SeqLM.from_pretrained(base_folder), rank=4, dropout=0.1)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2} | options
    trainer = make_trainer(model, folder, tokenizers=tiny_pair(), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_checkpoint_holds_the_adapter_alone_and_training_goes_on_from_it(base_folder, tmp_path):
    whole = fine_tune(base_folder, tmp_path / "run")
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["adapter_model.safetensors"]
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert len(saved) == len(adapter_weights(whole.model)) and all("lora_" in name for name in saved)
    assert json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base_folder)
    resumed = fine_tune(base_folder, tmp_path / "resumed", str(checkpoint))
    assert_equal(adapter_weights(resumed.model), adapter_weights(whole.model))

    loaded = load_lora(tmp_path / "run" / "checkpoint-4").eval()
    batch = random_batch(loaded.config)
    assert torch.equal(loaded(**batch).logits, whole.model.eval()(**batch).logits)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    trainable = load_lora(tmp_path / "run" / "checkpoint-4", is_trainable=True)
    assert adapter_weights(trainable).keys() == adapter_weights(whole.model).keys()


def test_best_adapter_comes_back_at_the_end(base_folder, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = fine_tune(base_folder, tmp_path / "run", learning_rate=3.0, metric_for_best_model="loss", **options)
    best = trainer.state.best_model_checkpoint
    saved = load_file(f"{best}/adapter_model.safetensors")
    for model in (load_lora(best, is_trainable=True), trainer.model):
        assert_equal({name.replace(".default", ""): weight for name, weight in adapter_weights(model).items()}, saved)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)


# Merging


@pytest.mark.parametrize("design", DESIGNS)
def test_merged_model_says_what_the_adapted_one_said(design, tmp_path):
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
    merge_lora(adapted, tmp_path)
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert type(merged) is type(model) and set(merged.state_dict()) == names
    scale = expected.abs().max().item()
    torch.testing.assert_close(merged(**batch).logits, expected, atol=1e-5 * max(scale, 1), rtol=1e-5)
    assert torch.equal(merged.generate(**inputs, **options), generated)


def test_folder_is_merged_into_one_that_needs_neither_peft_nor_the_base(base_folder, tmp_path, monkeypatch):
    trainer = fine_tune(base_folder, tmp_path / "run", learning_rate=0.01)
    trainer.save_model()
    texts = Generator(trainer.model.eval(), tiny_pair()).generate(SOURCES)
    batch = random_batch(trainer.model.config)
    expected = trainer.model(**batch).logits
    merged = merge_lora(tmp_path / "run", tmp_path / "merged")
    assert all(parameter.requires_grad for parameter in merged.parameters())
    torch.testing.assert_close(merged.eval()(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    base_folder.rename(tmp_path / "elsewhere")
    with monkeypatch.context() as without_peft:
        without_peft.setitem(sys.modules, "peft", None)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(loaded(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    assert not any("adapter" in path.name for path in (tmp_path / "merged").iterdir())

    generator = Generator.from_pretrained(tmp_path / "merged", device="cpu")
    assert generator.model.generation_config.max_new_tokens == 7
    assert generator.generate(SOURCES) == texts
    # With the base elsewhere the adapter must be told where.
    with pytest.raises(ValueError, match=r"`base_model` must be the model that .*run was trained on, got '.*base'"):
        load_lora(tmp_path / "run")
    again = merge_lora(tmp_path / "run", tmp_path / "again", tmp_path / "elsewhere")
    assert torch.equal(again.eval()(**batch).logits, merged(**batch).logits)


def test_what_cannot_be_merged_is_refused(base_folder, tmp_path):
    adapter = tmp_path / "adapter"
    with pytest.raises(ValueError, match=r"must be a folder with adapter_config\.json, got .*base without"):
        merge_lora(base_folder, tmp_path / "out")
    moved_lora(AutoModelForSeq2SeqLM.from_pretrained(base_folder)).save_pretrained(adapter)
    with pytest.raises(ValueError, match="`output` must not hold an adapter, which would be added once more"):
        merge_lora(adapter, adapter)
    # An adapter in another format is not unpickled.
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"must be a folder with adapter_model\.safetensors"):
        merge_lora(adapter, tmp_path / "out")
    moved_lora(tiny_model()).save_pretrained(tmp_path / "nameless")
    with pytest.raises(ValueError, match=r"`base_model` must be given, because the adapter in .*nameless does not say"):
        merge_lora(tmp_path / "nameless", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert is_adapted(load_lora(tmp_path / "nameless", tiny_model()))

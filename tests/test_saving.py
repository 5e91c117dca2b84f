"""Tests of what transformers does to a model's weights: saving, loading, initialization, ties, resizing."""

import copy
import io
import logging

import pytest
import torch
from safetensors import safe_open
from tiny_models import CROSSED, DESIGNS, fields_of, random_batch, randomize, tiny_config, tiny_model
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding

from metaphrase.modeling import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

MODEL_CLASSES = [MetaphraseForConditionalGeneration, MetaphraseModel, MetaphraseEncoderModel]
TIES = {
    f"{'tied' if tied else 'untied'}-{'shared' if shared else 'separate'}": {
        "tie_word_embeddings": tied,
        "share_embeddings": shared,
        "decoder_vocab_size": None if shared else 31,
        "logits_bias": True,
    }
    for tied in (True, False)
    for shared in (True, False)
}


@pytest.fixture
def warned():
    """What transformers warned of during the test."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    yield records
    logging.getLogger("transformers").removeHandler(handler)


def every_tensor(model):
    """All parameters and buffers by name, saved ones or not, ties under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def assert_same_tensors(model, expected):
    tensors, expected_tensors = every_tensor(model), every_tensor(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu", name
        assert torch.equal(tensor, expected_tensors[name]), name


def assert_std(tensor, expected, name):
    """Within four standard errors."""
    tolerance = 4 / (2 * tensor.numel()) ** 0.5
    assert tensor.std().item() == pytest.approx(expected, rel=tolerance), name


def saved_tensors(folder):
    """Shape of each tensor in a checkpoint of one file."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def tie_groups(model):
    """Which of the three embeddings are one tensor."""
    storage = {
        "source": model.get_encoder().embed_tokens.weight,
        "target": model.get_decoder().embed_tokens.weight,
        "head": model.lm_head.weight,
    }
    return {frozenset(other for other in storage if storage[other] is storage[name]) for name in storage}


def expected_groups(config):
    if config.share_embeddings and config.tie_word_embeddings:
        return {frozenset(("source", "target", "head"))}
    if config.share_embeddings:
        return {frozenset(("source", "target")), frozenset(("head",))}
    if config.tie_word_embeddings:
        return {frozenset(("source",)), frozenset(("target", "head"))}
    return {frozenset(("source",)), frozenset(("target",)), frozenset(("head",))}


# Saving and loading


@pytest.mark.parametrize("design", CROSSED)
def test_loaded_model_is_the_saved_one(design, tmp_path, warned):
    model = tiny_model(**CROSSED[design])
    model.save_pretrained(tmp_path)
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert not loaded.training
    assert_same_tensors(loaded, model)
    assert fields_of(loaded.config) == fields_of(model.config)
    inputs = random_batch(model.config)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert not warned


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_every_class_loads_from_the_folder_of_the_whole_model(model_class, design, tmp_path, warned):
    whole = tiny_model(**DESIGNS[design])
    whole.save_pretrained(tmp_path)
    auto_class = {
        MetaphraseForConditionalGeneration: AutoModelForSeq2SeqLM,
        MetaphraseModel: AutoModel,
        MetaphraseEncoderModel: AutoModelForTextEncoding,
    }[model_class]
    part = {MetaphraseForConditionalGeneration: whole, MetaphraseModel: whole.model}.get(
        model_class, whole.model.encoder
    )
    for loader in (model_class, auto_class):
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is model_class
        assert not info["missing_keys"] and not info["mismatched_keys"]
        # The untied head is what the model without one has no place for.
        is_headless = model_class is MetaphraseModel and not whole.config.tie_word_embeddings
        assert set(info["unexpected_keys"]) == ({"lm_head.weight"} if is_headless else set()) | (
            {"lm_head.bias"} if model_class is MetaphraseModel and whole.config.logits_bias else set()
        )
        assert_same_tensors(loaded.encoder if model_class is MetaphraseEncoderModel else loaded, part)
    inputs = random_batch(whole.config)
    if model_class is MetaphraseEncoderModel:
        del inputs["decoder_input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs)[0], part(**inputs)[0], rtol=0, atol=0)
    if model_class is not MetaphraseModel:
        assert not warned


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("ties", TIES)
def test_every_class_saves_and_loads_itself(model_class, ties, tmp_path, warned):
    model = tiny_model(model_class, **TIES[ties])
    model.save_pretrained(tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_tensors(loaded, model)
    assert not warned


@pytest.mark.parametrize("ties", TIES)
def test_head_model_from_the_folder_of_the_headless_one(ties, tmp_path):
    headless = tiny_model(MetaphraseModel, **TIES[ties])
    headless.save_pretrained(tmp_path)
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    # A tied head is there already: only what no checkpoint of the headless model can have is missing.
    expected = {"lm_head.bias"} if headless.config.tie_word_embeddings else {"lm_head.bias", "lm_head.weight"}
    assert set(info["missing_keys"]) == expected and not info["unexpected_keys"]
    assert_same_tensors(loaded.model, headless)
    assert tie_groups(loaded) == expected_groups(loaded.config)
    assert torch.equal(loaded.lm_head.bias, torch.zeros(loaded.config.decoder_vocab_size))


@pytest.mark.parametrize("ties", TIES)
def test_ties_before_and_after_saving(ties, tmp_path):
    model = tiny_model(**TIES[ties])
    config = model.config
    assert tie_groups(model) == expected_groups(config)
    model.save_pretrained(tmp_path)
    saved = saved_tensors(tmp_path)
    embeddings = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"}
    assert len(embeddings & saved.keys()) == len(expected_groups(config))
    assert saved.keys() <= model.state_dict().keys()
    loaded = MetaphraseForConditionalGeneration.from_pretrained(tmp_path)
    assert tie_groups(loaded) == expected_groups(config)
    for clone in (copy.deepcopy(model), loaded.to(torch.float64)):
        assert tie_groups(clone) == expected_groups(config)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize(
    "kept", ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
)
def test_checkpoint_with_any_name_of_a_tied_weight_is_complete(ties, kept, tmp_path):
    model = tiny_model(**TIES[ties])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = {
        "source": "model.encoder.embed_tokens.weight",
        "target": "model.decoder.embed_tokens.weight",
        "head": "lm_head.weight",
    }
    for group in expected_groups(model.config):
        group_names = [names[member] for member in group]
        if kept in group_names:
            for name in group_names:
                if name != kept:
                    del state[name]
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(
        None, config=model.config, state_dict=state, output_loading_info=True
    )
    assert not any(info.values()), info
    assert_same_tensors(loaded, model)
    assert tie_groups(loaded) == expected_groups(model.config)


def test_torch_save_and_deepcopy(tmp_path):
    model = tiny_model(**DESIGNS["sinusoidal"])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for clone in (torch.load(buffer, weights_only=False), copy.deepcopy(model)):
        assert_same_tensors(clone, model)
        assert clone.lm_head.weight is clone.model.encoder.embed_tokens.weight


def test_load_state_dict_is_strict():
    model, other = tiny_model(**TIES["tied-shared"]), tiny_model(**TIES["tied-shared"], seed=1)
    model.load_state_dict(other.state_dict())
    assert_same_tensors(model, other)


@pytest.mark.parametrize("design", DESIGNS)
def test_sharded_checkpoint_with_device_map(design, tmp_path):
    model = tiny_model(**DESIGNS[design])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_tensors(MetaphraseForConditionalGeneration.from_pretrained(tmp_path, device_map="cpu"), model)
    assert_same_tensors(MetaphraseForConditionalGeneration.from_pretrained(tmp_path, low_cpu_mem_usage=True), model)


@pytest.mark.parametrize("design", DESIGNS)
def test_loading_in_bfloat16_keeps_the_tables_exact(design, tmp_path):
    model = tiny_model(**DESIGNS[design])
    model.save_pretrained(tmp_path)
    loaded = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.config.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    buffers = dict(loaded.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    inputs = random_batch(model.config)
    with torch.no_grad():
        # The same weights in full precision tell the error of the arithmetic from that of rounded weights.
        expected = copy.deepcopy(loaded).float()(**inputs).logits
        difference = (loaded(**inputs).logits.float() - expected).norm() / expected.norm()
    assert 0 < difference < 0.2


def test_checkpoint_of_another_shape_is_refused_unless_ignored(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError):
        MetaphraseForConditionalGeneration.from_pretrained(tmp_path, vocab_size=40, decoder_vocab_size=40)
    model, info = MetaphraseForConditionalGeneration.from_pretrained(
        tmp_path, vocab_size=40, decoder_vocab_size=40, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {name for name, *_ in info["mismatched_keys"]} == {"model.encoder.embed_tokens.weight"}
    assert model.lm_head.weight.shape == (40, 32)
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
    assert model.lm_head.weight.isfinite().all() and model.lm_head.weight.std() > 0.3


# Initialization


@pytest.mark.parametrize("model_class", [MetaphraseForConditionalGeneration, MetaphraseEncoderModel])
@pytest.mark.parametrize("design", DESIGNS)
def test_initialization_fills_what_was_on_the_meta_device(model_class, design):
    config = tiny_config(**DESIGNS[design])
    usual = model_class(config)
    with torch.device("meta"):
        model = model_class(config)
    assert all(tensor.is_meta for tensor in every_tensor(model).values())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in every_tensor(model).values():
            tensor.fill_(float("nan"))
    model.init_weights()
    usual_tensors = every_tensor(usual)
    for name, tensor in every_tensor(model).items():
        assert tensor.isfinite().all(), name
        if name.endswith(("slopes", "inv_freq", "table")) or tensor.ndim == 1:
            assert torch.equal(tensor, usual_tensors[name]), name
        else:
            assert_std(tensor, config.initializer_range, name)


@pytest.mark.parametrize("model_class", [MetaphraseForConditionalGeneration, MetaphraseEncoderModel])
@pytest.mark.parametrize("design", DESIGNS)
def test_missing_weights_are_initialized_under_the_seed(model_class, design):
    config = tiny_config(**DESIGNS[design])

    def load(seed):
        torch.manual_seed(seed)
        return model_class.from_pretrained(None, config=config, state_dict={})

    model, again, other = load(0), load(0), load(1)
    assert_same_tensors(again, model)
    torch.manual_seed(0)
    usual_tensors = every_tensor(model_class(config))
    others = every_tensor(other)
    for name, tensor in every_tensor(model).items():
        assert tensor.shape == usual_tensors[name].shape
        assert tensor.isfinite().all(), name
        if name.endswith(("slopes", "inv_freq", "table")) or tensor.ndim == 1:
            assert torch.equal(tensor, usual_tensors[name]), name
        else:
            assert_std(tensor, config.initializer_range, name)
            assert not torch.equal(tensor, others[name]), name


@pytest.mark.parametrize("design", DESIGNS)
def test_partial_checkpoint_keeps_what_it_has(design):
    model = tiny_model(**DESIGNS[design])
    missing = {name for name in model.state_dict() if "mlp" in name or "norm" in name}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in missing}
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(
        None, config=model.config, state_dict=state, output_loading_info=True
    )
    assert set(info["missing_keys"]) == missing
    for name, tensor in every_tensor(loaded).items():
        assert tensor.isfinite().all()
        assert torch.equal(tensor, every_tensor(model)[name]) != (name in missing), name


@pytest.mark.parametrize("design", DESIGNS)
def test_initialization_by_shape(design):
    config = tiny_config(**(DESIGNS[design] | {"initializer_range": None, "hidden_size": 64, "head_dim": 16}))
    model = MetaphraseForConditionalGeneration(config)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            std = (2 / (module.in_features + module.out_features)) ** 0.5
            if module is model.lm_head:
                std = 64**-0.5
            elif name.endswith("q_proj") and config.attention_scale is not None:
                std *= 16**-0.5 / config.attention_scale
            assert_std(module.weight, std, name)
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, torch.nn.Embedding):
            assert_std(module.weight, 64**-0.5, name)
        elif "norm" in name and hasattr(module, "weight"):
            assert torch.equal(module.weight, torch.ones_like(module.weight)), name


# Resizing


def logits_of(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize(
    ("requested", "multiple", "size"), [(45, None, 45), (20, None, 20), (41, 16, 48), (None, 16, 48)]
)
def test_resizing_the_source_or_both(ties, requested, multiple, size, tmp_path):
    model = tiny_model(**TIES[ties])
    config = model.config
    old_head, old_source = copy.deepcopy(model.lm_head), model.get_input_embeddings().weight.detach().clone()
    inputs = random_batch(tiny_config(**(TIES[ties] | {"vocab_size": 20, "decoder_vocab_size": 20})))
    before = logits_of(model, inputs)
    embeddings = model.resize_token_embeddings(requested, pad_to_multiple_of=multiple)

    assert embeddings is model.get_input_embeddings() is model.get_encoder().embed_tokens
    assert type(embeddings) is type(model.get_decoder().embed_tokens)
    assert embeddings.scale == 32**0.5
    assert config.vocab_size == embeddings.num_embeddings == len(embeddings.weight) == size
    kept = min(37, size)
    assert torch.equal(embeddings.weight[:kept], old_source[:kept])
    target_size = size if config.share_embeddings else 31
    assert config.decoder_vocab_size == target_size == model.get_decoder().embed_tokens.num_embeddings
    assert model.lm_head.weight.shape == (target_size, 32) and model.lm_head.bias.shape == (target_size,)
    assert model.lm_head.out_features == target_size
    assert tie_groups(model) == expected_groups(config)
    kept = min(len(old_head.weight), target_size)
    assert torch.equal(model.lm_head.weight[:kept], old_head.weight[:kept])
    assert torch.equal(model.lm_head.bias[:kept], old_head.bias[:kept])
    assert every_tensor(model)["lm_head.weight"].isfinite().all() and model.lm_head.bias.isfinite().all()
    after = logits_of(model, inputs)
    assert after.shape[-1] == target_size
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    assert_usable_after_resizing(model, inputs, tmp_path)


@pytest.mark.parametrize("ties", ["tied-separate", "untied-separate"])
@pytest.mark.parametrize("of_the_head_model", [True, False])
@pytest.mark.parametrize(
    ("requested", "multiple", "size"), [(45, None, 45), (20, None, 20), (33, 16, 48), (None, 16, 32)]
)
def test_resizing_the_target_alone(ties, of_the_head_model, requested, multiple, size, tmp_path):
    model = tiny_model(MetaphraseForConditionalGeneration if of_the_head_model else MetaphraseModel, **TIES[ties])
    config = model.config
    old = copy.deepcopy(model)
    inputs = random_batch(tiny_config(vocab_size=20))
    embeddings = model.resize_decoder_token_embeddings(requested, pad_to_multiple_of=multiple)
    assert embeddings is model.get_decoder().embed_tokens
    assert config.decoder_vocab_size == embeddings.num_embeddings == len(embeddings.weight) == size
    assert config.vocab_size == 37
    assert torch.equal(model.get_input_embeddings().weight, old.get_input_embeddings().weight)
    kept = min(31, size)
    assert torch.equal(embeddings.weight[:kept], old.get_decoder().embed_tokens.weight[:kept])
    if of_the_head_model:
        assert tie_groups(model) == expected_groups(config)
        assert model.lm_head.weight.shape == (size, 32) and model.lm_head.bias.shape == (size,)
        torch.testing.assert_close(logits_of(model, inputs)[..., :kept], logits_of(old, inputs)[..., :kept])
        assert_usable_after_resizing(model, inputs, tmp_path)


def assert_usable_after_resizing(model, inputs, folder):
    """It trains, generates, and is the same model after saving."""
    labels = torch.full((3, 4), model.config.decoder_vocab_size - 1)
    sources = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    model(**sources, labels=labels).loss.backward()
    assert model.lm_head.weight.grad[-1].any()
    generated = model.generate(**sources, max_new_tokens=3, num_beams=2)
    model.save_pretrained(folder)
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_tensors(loaded, model)
    assert tie_groups(loaded) == expected_groups(model.config)
    assert torch.equal(loaded.generate(**sources, max_new_tokens=3, num_beams=2), generated)


def test_resizing_the_target_of_shared_embeddings_is_refused():
    with pytest.raises(ValueError, match="`share_embeddings` must be false"):
        tiny_model().resize_decoder_token_embeddings(40)


@pytest.mark.parametrize("ties", TIES)
def test_resizing_keeps_what_was_frozen(ties):
    model = tiny_model(**TIES[ties]).requires_grad_(False)
    model.resize_token_embeddings(45)
    if not model.config.share_embeddings:
        model.resize_decoder_token_embeddings(45)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("initializer_range", [None, 0.4])
def test_new_entries_are_initialized_like_old_ones(ties, initializer_range):
    model = tiny_model(**TIES[ties], initializer_range=initializer_range)
    model.resize_token_embeddings(237, mean_resizing=False)
    if not model.config.share_embeddings:
        model.resize_decoder_token_embeddings(231, mean_resizing=False)
    std = initializer_range or 32**-0.5
    assert_std(model.get_encoder().embed_tokens.weight[37:], std, "source")
    assert_std(model.get_decoder().embed_tokens.weight[-200:], std, "target")
    assert_std(model.lm_head.weight[-200:], std, "head")
    assert not model.lm_head.bias[-200:].any()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_setting_embeddings(model_class):
    model = tiny_model(model_class, logits_bias=True)
    embeddings = copy.deepcopy(model.get_input_embeddings())
    model.set_input_embeddings(embeddings)
    assert model.get_input_embeddings() is model.encoder.embed_tokens if hasattr(model, "encoder") else True
    assert model.get_input_embeddings() is embeddings
    if model_class is MetaphraseForConditionalGeneration:
        head = torch.nn.Linear(32, 37)
        model.set_output_embeddings(head)
        assert model.get_output_embeddings() is head
        model.tie_weights()
        assert tie_groups(model) == {frozenset(("source", "target", "head"))}
    else:
        assert model.get_output_embeddings() is None


def test_encoder_model_resizes():
    model = tiny_model(MetaphraseEncoderModel, **TIES["tied-shared"])
    model.resize_token_embeddings(50)
    assert model.get_input_embeddings().weight.shape == (50, 32)
    randomize(model)
    assert model(torch.tensor([[49, 3]])).last_hidden_state.isfinite().all()

"""Tests of `conversion.families`: converted models equal transformers' own classes, for random variants."""

import json

import pytest
import torch
from converted_models import VARIANTS, bart_like, check_conversion, draw, encoder_decoder_like, fill_randomly
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from metaphrase.conversion import FAMILIES, convert
from metaphrase.conversion.families.family import HEAD
from metaphrase.conversion.families.two_stacks import TOWER
from metaphrase.modeling.configuration_metaphrase import SLIDING, STACKS


def t5_like(family, rng):
    """Return a model of random dimensions, plain or gated, with tied or untied head."""
    is_gated, has_own_head = rng.random() < 0.5, rng.random() < 0.5
    activation = rng.choice(("relu", "gelu", "silu", "gelu_new"))
    buckets = rng.choice((4, 8, 10, 32))
    ranges = {"vocab_size": (29, 61), "d_model": (17, 48), "d_kv": (3, 11), "d_ff": (17, 60), "num_heads": (1, 5)}
    ranges |= {"num_layers": (1, 3), "num_decoder_layers": (1, 3)}
    ranges |= {"relative_attention_max_distance": (buckets // 2 + 1, buckets // 2 + 20)}
    fields = {name: rng.randint(*bounds) for name, bounds in ranges.items()}
    fields |= {"relative_attention_num_buckets": buckets, "layer_norm_epsilon": rng.choice((1e-6, 1e-5))}
    fields |= {"feed_forward_proj": f"gated-{activation}" if is_gated else activation}
    fields |= {"decoder_start_token_id": 0, "tie_word_embeddings": rng.random() < 0.5}
    if family == "longt5":
        fields |= {"local_radius": rng.randint(1, 4), "encoder_attention_type": "local"}
    config = AutoConfig.for_model(family, **fields)
    theirs = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    if has_own_head:
        # transformers unties the projection only while it loads a checkpoint that has one.
        theirs.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        del theirs.all_tied_weights_keys[HEAD]
    fill_randomly(theirs, rng.randrange(2**31))
    # T5 does not divide its scores by the root of the heads' width: as where it is initialized, queries are that much smaller.
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(".q.weight"):
                parameter.mul_(config.d_kv**-0.5)
    return theirs


def marian_fields(rng):
    sizes = {"vocab_size": rng.randint(29, 61)}
    is_shared = rng.random() < 0.5
    if not is_shared:
        sizes["decoder_vocab_size"] = rng.randint(29, 61)
    last = min(sizes.values()) - 1
    fields = {"pad_token_id": last, "decoder_start_token_id": last, "eos_token_id": 0, "forced_eos_token_id": 0}
    if is_shared:
        # Untied, their class would have a fourth embedding that nothing reads.
        fields["tie_word_embeddings"] = True
    return sizes | fields | {"share_encoder_decoder_embeddings": is_shared}


def fsmt_fields(rng):
    sizes = {"src_vocab_size": rng.randint(29, 61), "tgt_vocab_size": rng.randint(29, 61)}
    is_tied = rng.random() < 0.3
    if is_tied:
        # Its class ties all embeddings or none.
        sizes["src_vocab_size"] = sizes["tgt_vocab_size"]
    return sizes | {"tie_word_embeddings": is_tied, "vocab_size": sizes["tgt_vocab_size"]}


def led_fields(rng):
    positions = {f"max_{stack}_position_embeddings": rng.randint(16, 40) for stack in ("encoder", "decoder")}
    return positions | {"attention_window": rng.choice((2, 4, 6))}


def copy_local_projections(theirs):
    """Make the projections of an LED's global attention as they are written back."""
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "_global." in name:
                parameter.copy_(theirs.get_parameter(name.replace(*FAMILIES["led"].copy_name)))


def t5gemma_like(family, rng):
    """Return a model with windows shorter than the texts. The stacks of a T5Gemma differ in all sizes.

    A T5Gemma 2 has the small tower of zeros that is written back.
    """
    shared = {"head_dim": rng.choice((4, 6, 10)), "sliding_window": rng.randint(2, 4)}
    shared |= {"vocab_size": rng.randint(29, 61), "query_pre_attn_scalar": rng.randint(3, 20)}
    shared["rms_norm_eps"] = rng.choice((1e-6, 1e-5))
    is_first = family == "t5gemma"
    if is_first:
        shared |= {"attention_bias": rng.random() < 0.5, "attn_logit_softcapping": rng.choice((None, 0.5, 2.0))}
    else:
        thetas = {"full_attention": 1e4, "sliding_attention": 100.0}
        rotations = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
        shared |= {"rope_parameters": rotations, "hidden_size": rng.choice((12, 20, 28)), "num_attention_heads": 4}

    def stack():
        layers, heads = rng.randint(1, 3), rng.choice((2, 4))
        sizes = {"hidden_size": heads * rng.randint(5, 9), "num_attention_heads": heads} if is_first else {}
        sizes |= {"num_key_value_heads": rng.choice((1, 2)), "intermediate_size": rng.randint(17, 50)}
        kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
        return shared | sizes | {"num_hidden_layers": layers, "layer_types": kinds}

    encoder, decoder = stack(), stack() | {"final_logit_softcapping": rng.choice((None, 1.0, 30.0))}
    if is_first:
        fields = {"vocab_size": shared["vocab_size"], "tie_word_embeddings": rng.random() < 0.5}
    else:
        fields = {}
        encoder = {"text_config": encoder, "vision_config": TOWER, "mm_tokens_per_image": 1}
    config = AutoConfig.for_model(family, encoder=encoder, decoder=decoder, **fields)
    theirs = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    fill_randomly(theirs, rng.randrange(2**31))
    ignored = FAMILIES[family].ignored_prefixes
    for name, parameter in theirs.named_parameters():
        if ignored and name.replace(*FAMILIES[family].file_name).startswith(ignored):
            parameter.requires_grad_(False).zero_()
    return theirs


FIELDS = dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "mvp", "pegasus"), lambda rng: {})
FIELDS |= dict.fromkeys(("mbart", "plbart"), lambda rng: {"decoder_start_token_id": 5})
FIELDS |= {"marian": marian_fields, "led": led_fields, "fsmt": fsmt_fields}
FIELDS["m2m_100"] = lambda rng: {"pad_token_id": rng.choice((0, 1, 3)), "bos_token_id": 0, "eos_token_id": 2}
MAKERS = dict.fromkeys(("t5", "mt5", "umt5", "longt5"), t5_like)
MAKERS |= dict.fromkeys(("t5gemma", "t5gemma2"), t5gemma_like)
KINDS = ("bert", "roberta", "bert-generation")


@pytest.mark.parametrize("family", [*MAKERS, *FIELDS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_model_equals_its_own_class(family, variant, tmp_path):
    rng = draw(family, variant)
    theirs = MAKERS[family](family, rng) if family in MAKERS else bart_like(family, rng, **FIELDS[family](rng))
    if family in ("bart", "mbart", "plbart", "m2m_100"):
        theirs.generation_config.forced_bos_token_id = rng.choice((None, 7))
    if family == "led":
        copy_local_projections(theirs)
    check_conversion(theirs, family, rng, tmp_path)


def drop_weight(folder, suffix):
    """Remove a weight of a folder, as transformers 4 did in some checkpoints."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    [name] = [name for name in weights if name.endswith(suffix)]
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})


def test_fsmt_without_the_decoders_embedding_uses_its_projection(tmp_path):
    rng = draw("fsmt", 0)
    theirs = bart_like("fsmt", rng, tie_word_embeddings=False, vocab_size=37, src_vocab_size=37, tgt_vocab_size=37)
    with torch.no_grad():
        theirs.model.decoder.embed_tokens.weight.copy_(theirs.model.decoder.output_projection.weight)
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "whole")
    drop_weight(tmp_path / "theirs", "decoder.embed_tokens.weight")
    convert(tmp_path / "theirs", tmp_path / "part")
    whole, part = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).eval() for name in ("whole", "part"))
    ids = torch.arange(4, 12)[None]
    with torch.inference_mode():
        expected, logits = (model(input_ids=ids, decoder_input_ids=ids).logits for model in (whole, part))
    assert torch.equal(logits, expected)
    assert not torch.equal(whole.get_input_embeddings().weight, whole.get_decoder().get_input_embeddings().weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_encoder_decoder_equals_its_own_class(kind, variant, tmp_path):
    rng = draw(kind, variant)
    check_conversion(encoder_decoder_like(kind, rng), "encoder-decoder", rng, tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"encoder": {"model_type": "roberta"}}, "`model_type`"),
        ("bert", {"decoder": {"hidden_size": 16}}, "`hidden_size`"),
        ("bert", {"decoder": {"layer_norm_eps": 1e-3}}, "`layer_norm_eps`"),
        ("bert", {"decoder": {"type_vocab_size": 9}}, "`type_vocab_size`"),
        ("roberta", {"whole": {"decoder_start_token_id": 1, "pad_token_id": 1}}, "must not be `pad_token_id`"),
    ],
    ids=str,
)
def test_encoder_decoders_that_do_not_fit_are_refused(kind, changes, message, tmp_path):
    changes = {"encoder": {}, "decoder": {}} | changes
    for name in STACKS:
        changes[name] = {"pad_token_id": 1, "num_attention_heads": 1} | changes[name]
    changes["whole"] = {"pad_token_id": 1} | changes.get("whole", {})
    encoder_decoder_like(kind, draw(kind, 0), **changes).save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_offset": 3}, "`position_offset` must be 1, got 3"),
        ({"position_offset": 1, "activation_function": "relu"}, "`activation_function` must be gelu, got relu"),
        ({"type_vocab_size": None}, "`type_vocab_size` must be a number, got None"),
        ({"head_transform": False}, "`type_vocab_size` must be None, got 2"),
        ({"share_embeddings": True}, "`share_embeddings` must be False, got True"),
    ],
)
def test_models_that_no_encoder_decoder_is_are_refused(fields, message, tmp_path):
    design = {"position_embedding_type": "learned", "norm_type": "layernorm", "norm_position": "post"}
    design |= {"embedding_norm": True, "gated_mlp": False, "scale_embedding": False, "logits_bias": True}
    design |= {"type_vocab_size": 2, "head_transform": True, "share_embeddings": False, "activation_function": "gelu"}
    tiny_model(**design | fields).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=rf"The model is no encoder-decoder: {message}\.$"):
        convert(tmp_path / "ours", tmp_path / "theirs", to="encoder-decoder")


@pytest.mark.parametrize("kind", KINDS)
def test_an_untied_head_may_have_one_bias(kind, tmp_path):
    whole = {"tie_word_embeddings": False}
    theirs = encoder_decoder_like(kind, draw(kind, 0), whole=whole, encoder=whole, decoder=whole)
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "two")
    drop_weight(tmp_path / "theirs", ".decoder.bias")
    convert(tmp_path / "theirs", tmp_path / "one")
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert two.keys() == one.keys() and all(torch.equal(two[name], value) for name, value in one.items())


def test_global_attention_of_an_led_is_left_behind_and_made_anew(tmp_path, caplog):
    theirs = bart_like("led", rng := draw("led", 0), **led_fields(rng))
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert "projections of global attention are left behind" in caplog.text
    assert "class does not have" not in caplog.text
    convert(tmp_path / "ours", tmp_path / "again", to="led")
    copy_local_projections(theirs)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in theirs.state_dict().items() if name in again)
    ids = torch.arange(4, 12)[None]
    inputs = {"input_ids": ids, "decoder_input_ids": ids, "global_attention_mask": torch.ones_like(ids)}
    loaded = type(theirs).from_pretrained(tmp_path / "again").eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(**inputs).logits, theirs.eval()(**inputs).logits)


def test_different_windows_of_an_led_are_refused(tmp_path):
    rng = draw("led", 0)
    theirs = bart_like("led", rng, **led_fields(rng) | {"attention_window": [2, 4], "encoder_layers": 2})
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"`attention_window` .* got \[2, 4\]"):
        convert(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("window", [[0, 0], [1, 2], None])
def test_windows_that_an_led_lacks_are_refused(window):
    kinds = [SLIDING] * 2 if window else None
    fields = {"encoder_window": window, "encoder_layer_types": kinds, "position_embedding_type": "learned"}
    with pytest.raises(ValueError, match=r"is no led: .*`encoder_window` must be \[1, 1\]"):
        FAMILIES["led"].write_config(tiny_config(**fields))


@pytest.mark.parametrize("family", ["m2m_100", "fsmt"])
def test_decoder_that_starts_with_padding_is_refused(family, tmp_path):
    """fairseq gives padding no position, and the next token the first position."""
    sizes = {"src_vocab_size": 31, "tgt_vocab_size": 37} if family == "fsmt" else {}
    ids = {"pad_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    bart_like(family, draw(family, 0), **ids, **sizes).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    for name in ("theirs", "ours"):
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"decoder_start_token_id": 1}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"`decoder_start_token_id` must not be `pad_token_id`.*got 1 for both"):
            convert(tmp_path / name, tmp_path / "output", to=None if name == "theirs" else family)


def write_config(family, **fields):
    """Return the configuration of a family for a model of its design."""
    stacks = {"norm_position": "both", "norm_plus_one": True, "activation_function": "silu"}
    stacks |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "decoder_start_token_id": 1}
    stacks |= dict.fromkeys(("attention_bias", "mlp_bias", "train_padding_embedding"), False)
    is_second = family == "t5gemma2"
    stacks |= {"share_embeddings": is_second, "qk_norm": is_second, "merged_attention": is_second}
    return FAMILIES[family].write_config(tiny_config(**stacks | fields))


def test_full_and_sliding_layers_have_the_same_rotation_without_a_base_of_their_own():
    rotation = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    for theta, expected in ((None, rotation), (50.0, {"rope_type": "default", "rope_theta": 50.0})):
        written = write_config("t5gemma2", rope_parameters=rotation, sliding_rope_theta=theta)
        parameters = written["decoder"]["rope_parameters"]
        assert (parameters["full_attention"], parameters["sliding_attention"]) == (rotation, expected)
    # No token of a text stands for the end of an image.
    assert written["encoder"]["eoi_token_index"] == -1

"""Parity: the network with the weights of others must say what they say, forward and backward."""

import pytest
import torch
from tiny_models import padding_mask, random_batch, tiny_config, tiny_model
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import create_causal_mask

from metaphrase.modeling import MetaphraseForConditionalGeneration, MetaphraseModel
from metaphrase.modeling.layers import MetaphraseDecoderLayer, MetaphraseEncoderLayer
from metaphrase.modeling.positions import sinusoidal_table

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def enlarge(module, std=0.25):
    """Weights so large that attention is far from uniform, and norms away from 1 and 0, in place."""
    for parameter in module.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=std)
        else:
            nn.init.normal_(parameter, std=std)
    return module


# --- torch.nn.Transformer ------------------------------------------------------------------------------------------


def torch_attention(module, prefix):
    """Pairs of our names and parts of a torch attention: the joint projection is split in three."""
    pairs = {}
    for kind in ("weight", "bias"):
        joint = getattr(module, f"in_proj_{kind}")
        for index, name in enumerate(PROJECTIONS):
            pairs[f"{prefix}.{name}.{kind}"] = (joint, index)
        pairs[f"{prefix}.o_proj.{kind}"] = (getattr(module.out_proj, kind), None)
    return pairs


def torch_layer(layer, prefix=""):
    """Pairs {our name: (torch's parameter, third of it or None)} of an encoder or decoder layer."""
    pairs = torch_attention(layer.self_attn, f"{prefix}self_attn")
    norms = {"self_attn_norm": layer.norm1, "mlp_norm": layer.norm2}
    if isinstance(layer, nn.TransformerDecoderLayer):
        pairs |= torch_attention(layer.multihead_attn, f"{prefix}cross_attn")
        norms = {"self_attn_norm": layer.norm1, "cross_attn_norm": layer.norm2, "mlp_norm": layer.norm3}
    for name, module in (norms | {"mlp.up_proj": layer.linear1, "mlp.down_proj": layer.linear2}).items():
        for kind in ("weight", "bias"):
            pairs[f"{prefix}{name}.{kind}"] = (getattr(module, kind), None)
    return pairs


def third(tensor, index):
    return tensor if index is None else tensor.chunk(3)[index]


def copy_weights(ours, pairs):
    names = {name for name, _ in ours.named_parameters() if "embed_tokens" not in name}
    assert names == set(pairs)
    state = {name: third(parameter.detach(), index).clone() for name, (parameter, index) in pairs.items()}
    ours.load_state_dict(state, strict=False)


def draw_upstream(*shape):
    """The gradient of an output, so small that those of weights are of the order of 1: rounding grows with them."""
    return torch.randn(shape) / 16


def assert_equal_gradients(ours, pairs, our_inputs, their_inputs):
    for name, parameter in ours.named_parameters():
        if name in pairs:
            expected, index = pairs[name]
            torch.testing.assert_close(parameter.grad, third(expected.grad, index), **TOLERANCE, msg=name)
    for our_input, their_input in zip(our_inputs, their_inputs, strict=True):
        torch.testing.assert_close(our_input.grad, their_input.grad, **TOLERANCE)


def torch_fields(norm_position, activation, **fields):
    return {
        "position_embedding_type": "none",
        "norm_type": "layernorm",
        "norm_position": norm_position,
        "norm_eps": 1e-5,
        "activation_function": activation,
        "gated_mlp": False,
        "attention_bias": True,
        "mlp_bias": True,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    } | fields


def lowest_where(hidden):
    return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)


BOTH_NORM_POSITIONS = pytest.mark.parametrize("norm_position", ["pre", "post"])
BOTH_ACTIVATIONS = pytest.mark.parametrize("activation", ["relu", "gelu"])
BOTH_KERNELS = pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])


def twice(*shape):
    """The same random numbers for both sides, each to receive its own gradient."""
    states = torch.randn(shape)
    return states.clone().requires_grad_(), states.clone().requires_grad_()


def layers_of_both(our_class, their_class, norm_position, activation, attn_implementation):
    config = tiny_config(**torch_fields(norm_position, activation))
    config._attn_implementation = attn_implementation
    theirs = enlarge(
        their_class(32, 4, 48, 0.0, activation, batch_first=True, norm_first=norm_position == "pre")
    ).eval()
    ours = our_class(config, 0).eval()
    pairs = torch_layer(theirs)
    copy_weights(ours, pairs)
    return ours, theirs, pairs


@BOTH_NORM_POSITIONS
@BOTH_ACTIVATIONS
@BOTH_KERNELS
def test_encoder_layer_equals_torch(norm_position, activation, attn_implementation):
    ours, theirs, pairs = layers_of_both(
        MetaphraseEncoderLayer, nn.TransformerEncoderLayer, norm_position, activation, attn_implementation
    )
    (our_states, their_states), upstream = twice(3, 6, 32), draw_upstream(3, 6, 32)
    hidden = padding_mask([6, 4, 1], 6, "right") == 0
    output = ours(our_states, lowest_where(hidden)[:, None, None].expand(3, 1, 6, 6))
    expected = theirs(their_states, src_key_padding_mask=hidden)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    (output * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert_equal_gradients(ours, pairs, [our_states], [their_states])


@BOTH_NORM_POSITIONS
@BOTH_ACTIVATIONS
@BOTH_KERNELS
def test_decoder_layer_equals_torch(norm_position, activation, attn_implementation):
    ours, theirs, pairs = layers_of_both(
        MetaphraseDecoderLayer, nn.TransformerDecoderLayer, norm_position, activation, attn_implementation
    )
    (our_states, their_states), (our_memory, their_memory) = twice(3, 5, 32), twice(3, 6, 32)
    upstream = draw_upstream(3, 5, 32)
    hidden = padding_mask([6, 4, 1], 6, "left") == 0
    future = torch.ones(5, 5).triu(1).bool()
    output = ours(
        our_states,
        our_memory,
        lowest_where(future)[None, None].expand(3, 1, 5, 5),
        lowest_where(hidden)[:, None, None].expand(3, 1, 5, 6),
    )
    expected = theirs(their_states, their_memory, tgt_mask=future, memory_key_padding_mask=hidden)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    (output * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert_equal_gradients(ours, pairs, [our_states, our_memory], [their_states, their_memory])


@BOTH_NORM_POSITIONS
@BOTH_ACTIVATIONS
@BOTH_KERNELS
def test_whole_network_equals_torch(norm_position, activation, attn_implementation):
    """`torch.nn.Transformer` norms the output of both stacks, in post-norm too."""
    theirs = enlarge(
        nn.Transformer(32, 4, 3, 2, 48, 0.0, activation, batch_first=True, norm_first=norm_position == "pre")
    ).eval()
    ours = tiny_model(
        MetaphraseModel,
        attn_implementation=attn_implementation,
        **torch_fields(norm_position, activation, final_norm=True, encoder_layers=3, decoder_layers=2),
    )
    pairs = {}
    for name in ("encoder", "decoder"):
        stack = getattr(theirs, name)
        for index, layer in enumerate(stack.layers):
            pairs |= torch_layer(layer, f"{name}.layers.{index}.")
        pairs |= {f"{name}.norm.{kind}": (getattr(stack.norm, kind), None) for kind in ("weight", "bias")}
    copy_weights(ours, pairs)

    (our_source, their_source), (our_target, their_target) = twice(3, 6, 32), twice(3, 5, 32)
    source_mask, target_mask = padding_mask([6, 4, 1], 6, "right"), padding_mask([5, 5, 2], 5, "right")
    output = ours(
        inputs_embeds=our_source,
        attention_mask=source_mask,
        decoder_inputs_embeds=our_target,
        decoder_attention_mask=target_mask,
    ).last_hidden_state
    expected = theirs(
        their_source,
        their_target,
        tgt_mask=torch.ones(5, 5).triu(1).bool(),
        src_key_padding_mask=source_mask == 0,
        tgt_key_padding_mask=target_mask == 0,
        memory_key_padding_mask=source_mask == 0,
    )
    torch.testing.assert_close(output, expected, **TOLERANCE)
    upstream = draw_upstream(3, 5, 32)
    (output * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert_equal_gradients(ours, pairs, [our_source, our_target], [their_source, their_target])


# --- transformers --------------------------------------------------------------------------------------------------


def load(ours, state):
    """Loads a complete state: whatever is missing or left over is an error, but for tied copies."""
    missing, unexpected = ours.load_state_dict(state, strict=False)
    tied = set(ours.all_tied_weights_keys)
    assert not unexpected
    assert set(missing) <= tied
    return ours.eval()


def assert_equal_training(ours, theirs, inputs):
    """Equal logits, loss, and gradient of the embeddings, which comes through all of both stacks."""
    outputs = [ours(**inputs), theirs(**inputs)]
    for output, expected in ((outputs[0].logits, outputs[1].logits), (outputs[0].loss, outputs[1].loss)):
        torch.testing.assert_close(output, expected, **TOLERANCE)
    assert outputs[0].logits.std() > 0.1
    for output in outputs:
        output.loss.backward()
    gradients = [model.get_input_embeddings().weight.grad for model in (ours, theirs)]
    start = ours.config.decoder_start_token_id
    if theirs.get_input_embeddings().padding_idx == start:
        # Their embedding does not learn its padding token, with which Marian starts every target.
        assert not torch.allclose(gradients[0][start], gradients[1][start])
        gradients = [torch.cat((gradient[:start], gradient[start + 1 :])) for gradient in gradients]
    torch.testing.assert_close(*gradients, **TOLERANCE)


def assert_equal_generation(ours, theirs, inputs, **options):
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "do_sample": False} | options
    assert torch.equal(ours.generate(**inputs, **options), theirs.generate(**inputs, **options))


def t5_state(theirs, is_gated, is_tied):
    """T5's weights under our names."""
    weights = theirs.state_dict()
    state = {"model.encoder.embed_tokens.weight": weights["shared.weight"]}
    if not is_tied:
        state["lm_head.weight"] = weights["lm_head.weight"]
    attention = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
    mlp = {"up_proj": "wi", "down_proj": "wo"}
    if is_gated:
        mlp = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
    for stack, count in (("encoder", theirs.config.num_layers), ("decoder", theirs.config.num_decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        state[f"model.{stack}.position_bias.embedding.weight"] = weights[bias]
        state[f"model.{stack}.norm.weight"] = weights[f"{stack}.final_layer_norm.weight"]
        sublayers = {"self_attn": "SelfAttention", "mlp": "DenseReluDense"}
        if stack == "decoder":
            sublayers = {"self_attn": "SelfAttention", "cross_attn": "EncDecAttention", "mlp": "DenseReluDense"}
        for layer in range(count):
            for index, (name, theirs_name) in enumerate(sublayers.items()):
                old, new = f"{stack}.block.{layer}.layer.{index}", f"model.{stack}.layers.{layer}.{name}"
                state[f"{new}_norm.weight"] = weights[f"{old}.layer_norm.weight"]
                for ours_part, theirs_part in (mlp if name == "mlp" else attention).items():
                    state[f"{new}.{ours_part}.weight"] = weights[f"{old}.{theirs_name}.{theirs_part}.weight"]
    return state


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@BOTH_KERNELS
def test_whole_network_equals_t5(is_gated, is_tied, attn_implementation):
    theirs = T5ForConditionalGeneration(
        T5Config(
            vocab_size=37,
            d_model=32,
            d_kv=6,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=10,
            feed_forward_proj="gated-gelu" if is_gated else "relu",
            tie_word_embeddings=is_tied,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    if not is_tied:
        # transformers unties the projection only while it loads a checkpoint that has one.
        theirs.lm_head = nn.Linear(32, 37, bias=False)
    enlarge(theirs).eval()
    config = tiny_config(
        position_embedding_type="relative",
        head_dim=6,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        norm_type="rmsnorm",
        norm_position="pre",
        gated_mlp=is_gated,
        activation_function="gelu_new" if is_gated else "relu",
        attention_bias=False,
        mlp_bias=False,
        attention_scale=1.0,
        scale_embedding=False,
        tie_word_embeddings=is_tied,
        logits_scale=32**-0.5 if is_tied else 1.0,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    config._attn_implementation = attn_implementation
    ours = load(MetaphraseForConditionalGeneration(config), t5_state(theirs, is_gated, is_tied))
    inputs = random_batch(config, source=14, target=13, with_labels=True)
    assert_equal_training(ours, theirs, inputs)
    assert_equal_generation(ours, theirs, inputs)


def bart_state(theirs):
    """The weights of BART or Marian under our names."""
    weights = theirs.state_dict()
    replacements = {
        "out_proj": "o_proj",
        "self_attn_layer_norm": "self_attn_norm",
        "encoder_attn_layer_norm": "cross_attn_norm",
        "encoder_attn": "cross_attn",
        "final_layer_norm": "mlp_norm",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
        "layernorm_embedding": "embedding_norm",
    }
    state = {"lm_head.bias": weights["final_logits_bias"][0]}
    for name, value in weights.items():
        if name in ("final_logits_bias", "lm_head.weight", "model.shared.weight", "model.decoder.embed_tokens.weight"):
            continue
        parts = name.split(".")
        state[".".join(replacements.get(part, part) for part in parts)] = value
    return state


SEQ2SEQ = {
    "vocab_size": 37,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 20,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
OURS = {
    "decoder_layers": 3,
    "max_position_embeddings": 20,
    "norm_type": "layernorm",
    "norm_position": "post",
    "norm_eps": 1e-5,
    "gated_mlp": False,
    "logits_bias": True,
}


@BOTH_KERNELS
def test_whole_network_equals_bart(attn_implementation):
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    theirs = BartForConditionalGeneration(
        BartConfig(**SEQ2SEQ, **ids, activation_function="gelu", scale_embedding=False, forced_eos_token_id=None)
    )
    enlarge(theirs).eval()
    theirs.final_logits_bias = torch.randn(1, 37)
    config = tiny_config(
        **OURS,
        **ids,
        position_embedding_type="learned",
        activation_function="gelu",
        embedding_norm=True,
        scale_embedding=False,
    )
    config._attn_implementation = attn_implementation
    state = bart_state(theirs)
    for stack in ("encoder", "decoder"):
        # BART leaves the first two rows of its table unused.
        name = f"model.{stack}.embed_positions.weight"
        state[name] = state[name][2:]
    ours = load(MetaphraseForConditionalGeneration(config), state)
    inputs = random_batch(config, source=14, target=13, with_labels=True)
    assert_equal_training(ours, theirs, inputs)
    assert_equal_generation(ours, theirs, inputs)


@BOTH_KERNELS
def test_whole_network_equals_marian(attn_implementation):
    ids = {"pad_token_id": 36, "bos_token_id": None, "eos_token_id": 0, "decoder_start_token_id": 36}
    theirs = MarianMTModel(
        MarianConfig(**SEQ2SEQ, **ids, activation_function="swish", scale_embedding=True, forced_eos_token_id=None)
    )
    tables = {name: value.clone() for name, value in theirs.state_dict().items() if "embed_positions" in name}
    enlarge(theirs).eval()
    theirs.final_logits_bias = torch.randn(1, 37)
    for stack in ("encoder", "decoder"):
        table = tables[f"model.{stack}.embed_positions.weight"]
        getattr(theirs.model, stack).embed_positions.weight.data = table
        torch.testing.assert_close(sinusoidal_table(20, 32, "half_split"), table)
    config = tiny_config(
        **OURS,
        **ids,
        position_embedding_type="sinusoidal",
        sinusoidal_layout="half_split",
        activation_function="silu",
        scale_embedding=True,
    )
    config._attn_implementation = attn_implementation
    state = {name: value for name, value in bart_state(theirs).items() if "embed_positions" not in name}
    ours = load(MetaphraseForConditionalGeneration(config), state)
    inputs = random_batch(config, source=14, target=13, with_labels=True)
    assert_equal_training(ours, theirs, inputs)
    assert_equal_generation(ours, theirs, inputs)


@torch.no_grad()
def test_padding_mask_of_the_decoder_is_that_of_transformers():
    """Left padding of the target in our decoder hides what transformers' own mask hides."""
    model = tiny_model(attn_implementation="eager", position_embedding_type="none")
    inputs = random_batch(model.config)
    mask = padding_mask([5, 3, 2], 5, "left")
    weights = model(**inputs, decoder_attention_mask=mask, output_attentions=True).decoder_attentions[0]
    reference = create_causal_mask(
        config=model.config, inputs_embeds=torch.zeros(3, 5, 32), attention_mask=mask, past_key_values=None
    )
    visible = (reference == 0).expand(3, 4, 5, 5)
    has_keys = visible.any(-1, keepdim=True).expand_as(visible)
    assert torch.equal((weights > 0)[has_keys], visible[has_keys])

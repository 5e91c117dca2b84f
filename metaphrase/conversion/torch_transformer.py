"""Conversion from and to state dicts of `torch.nn.Transformer`, which has no embeddings and no head."""

from collections.abc import Mapping
from typing import Any

import torch

from metaphrase.conversion.checkpoints import RARE_FIELDS
from metaphrase.conversion.families.family import DECODER_EMBEDDING, ENCODER_EMBEDDING, refuse_obstacles, rename
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.modeling.configuration_metaphrase import STACKS

_NAMES = {
    r"^model\.": "",
    r"cross_attn\.": "multihead_attn.",
    "o_proj": "out_proj",
    r"\.mlp\.up_proj": ".linear1",
    r"\.mlp\.down_proj": ".linear2",
    "self_attn_norm": "norm1",
    "cross_attn_norm": "norm2",
    "^encoder(.*)mlp_norm": r"encoder\1norm2",
    "^decoder(.*)mlp_norm": r"decoder\1norm3",
    r"[qkv]_proj\.": "in_proj_",
}

# These hold for every `torch.nn.Transformer`.
_FIXED = RARE_FIELDS | {"norm_type": "layernorm", "gated_mlp": False, "attention_bias": True, "mlp_bias": True}
_FIXED |= {"qk_norm": False, "attention_scale": None, "num_key_value_heads": None, "head_dim": None}


def from_torch_transformer(
    state: Mapping[str, torch.Tensor],
    *,
    num_heads: int,
    activation: str = "relu",
    norm_first: bool = False,
    layer_norm_eps: float = 1e-5,
    source_embedding: torch.Tensor | None = None,
    target_embedding: torch.Tensor | None = None,
    **fields: Any,
) -> MetaphraseForConditionalGeneration:
    """Return a model with the layers of a `torch.nn.Transformer`.

    Args:
        state: State dict of the module, from which depths and widths follow.
        num_heads: `nhead` of the module.
        activation, norm_first, layer_norm_eps: Arguments of the module. The activation is relu or gelu.
        source_embedding: Initial embedding, shape (V, H). None draws random weights.
        target_embedding: Separate embedding of the target, shape (V, H), with which `share_embeddings` is false.
        **fields: Fields of `MetaphraseConfig` that the module leaves to its user: positions, scale of embeddings, ties,
            special ids. The default is no positions and no scale.

    Raises:
        MetaphraseError: If `state` is not that of a `torch.nn.Transformer` with biases.
    """
    known = _FIXED | {
        "hidden_size": state["encoder.layers.0.linear2.bias"].shape[0],
        "activation_function": activation,
        "norm_position": "pre" if norm_first else "post",
        "norm_eps": layer_norm_eps,
        "final_norm": "encoder.norm.weight" in state,
    }
    for stack in STACKS:
        count = 1 + max(int(name.split(".")[2]) for name in state if name.startswith(f"{stack}.layers."))
        known |= {f"{stack}_layers": count, f"{stack}_attention_heads": num_heads}
        known[f"{stack}_ffn_dim"] = state[f"{stack}.layers.0.linear1.bias"].shape[0]
    options: dict[str, Any] = {"position_embedding_type": "none", "scale_embedding": False}
    if source_embedding is not None:
        options["vocab_size"] = source_embedding.shape[0]
    if target_embedding is not None:
        options |= {"decoder_vocab_size": target_embedding.shape[0], "share_embeddings": False}
    # A field in both raises a TypeError.
    model = MetaphraseForConditionalGeneration(MetaphraseConfig(**known, **(options | fields)))
    counterparts = _counterparts(model)
    if difference := {theirs for theirs, _ in counterparts.values()} ^ state.keys():
        names = ", ".join(sorted(difference)[:3])
        raise MetaphraseError(f"`state` must be that of a `torch.nn.Transformer` with biases, got a change in {names}.")
    loaded = {
        name: state[theirs] if part is None else state[theirs].chunk(3)[part]
        for name, (theirs, part) in counterparts.items()
    }
    embeddings = {ENCODER_EMBEDDING: source_embedding, DECODER_EMBEDDING: target_embedding}
    loaded |= {name: value for name, value in embeddings.items() if value is not None}
    model.load_state_dict(loaded, strict=False)
    model.tie_weights()
    return model


def to_torch_transformer(model: MetaphraseForConditionalGeneration) -> dict[str, torch.Tensor]:
    """Return the state dict of the `torch.nn.Transformer` with a model's layers, without embeddings, positions and head.

    Raises:
        MetaphraseError: If the model has options that the module lacks. The message names all of them.
    """
    config = model.config
    heads = config.decoder_attention_heads
    required = _FIXED | {"encoder_attention_heads": heads, "encoder_ffn_dim": config.decoder_ffn_dim}
    required |= {"final_norm": True, "num_key_value_heads": heads, "head_dim": config.hidden_size // heads}
    allowed = {field: (value,) for field, value in required.items()} | {"norm_position": ("pre", "post")}
    # Positions outside of attention.
    allowed["position_embedding_type"] = ("learned", "sinusoidal", "none")
    refuse_obstacles(config, allowed, "no torch.nn.Transformer")
    parts: dict[str, dict[int | None, torch.Tensor]] = {}
    weights = model.state_dict()
    for name, (theirs, part) in _counterparts(model).items():
        parts.setdefault(theirs, {})[part] = weights[name]
    return {name: torch.cat([value for _, value in sorted(pieces.items())]) for name, pieces in parts.items()}


def _counterparts(model: MetaphraseForConditionalGeneration) -> dict[str, tuple[str, int | None]]:
    """Return for each of our weights that a `torch.nn.Transformer` has its name there, and the index of our part of three."""
    outside = ("lm_head.", ".embed_tokens.", ".embed_positions.", ".embedding_norm.")
    names = [name for name in model.state_dict() if not any(part in name for part in outside)]
    parts = {projection: index for index, projection in enumerate(("q_proj", "k_proj", "v_proj"))}
    return {name: (rename(name, _NAMES), parts.get(name.split(".")[-2])) for name in names}

"""The compute estimate: floating-point operations of a training step, and how long one takes."""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.training.planning.batches import BatchShape

_TOKENS = ("source_tokens", "target_tokens")
# Keys and values of the memory: weights of the decoder that meet source tokens. Names of Metaphrase, BART and T5.
_MEMORY_PROJECTION = re.compile(r"\.(cross_attn|encoder_attn|EncDecAttention)\.(k|v|k_proj|v_proj)$")


def forward_flops(model: PreTrainedModel, shapes: Sequence[BatchShape]) -> tuple[int, int]:
    """Operations of the forward passes of some batches, a multiplication and an addition counted as two.

    Matrix products alone are counted: 2 for each weight of a projection and each token that it meets, and for attention 4 for
    each score and each entry of a head. What a mask hides is counted as if it were computed.

    Source: Kaplan et al. 2020, section 2.1, arXiv 2001.08361.

    Returns:
        The operations of the layers, and those of the output projection.
    """
    source_tokens, target_tokens = (sum(getattr(shape, name) for shape in shapes) for name in _TOKENS)
    head = model.get_output_embeddings()
    encoder_modules = {id(module) for module in model.get_encoder().modules()}
    layers = sum(_score_flops(model, shape) for shape in shapes)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            meets_source = id(module) in encoder_modules or _MEMORY_PROJECTION.search(name)
            layers += 2 * module.weight.numel() * (source_tokens if meets_source else target_tokens)
    return layers, 0 if head is None else 2 * head.weight.numel() * target_tokens


def _score_flops(model: PreTrainedModel, shape: BatchShape) -> int:
    config = model.config
    if not hasattr(config, "get_head_dim"):
        return 0  # another family, whose widths go by other names: a few per cent at the lengths of sentences
    encoder = (
        config.encoder_layers * config.encoder_attention_heads * config.get_head_dim(config.encoder_attention_heads)
    )
    decoder = (
        config.decoder_layers * config.decoder_attention_heads * config.get_head_dim(config.decoder_attention_heads)
    )
    return 4 * (encoder * shape.source_scores + decoder * (shape.target_scores + shape.cross_scores))


def training_flops(model: PreTrainedModel, shapes: Sequence[BatchShape], is_checkpointed: bool = False) -> int:
    """Operations of the forward and backward passes: a backward pass takes twice the forward pass, and again with checkpoints.

    Args:
        model: The model.
        shapes: Of the batches.
        is_checkpointed: Whether layers are computed again in the backward pass.
    """
    layers, output = forward_flops(model, shapes)
    return (4 if is_checkpointed else 3) * layers + 3 * output


def measure_step_seconds(
    model: PreTrainedModel,
    batches: Sequence[Mapping[str, torch.Tensor]],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    bf16: bool = False,
) -> list[float]:
    """Times real training steps, which leave the weights and the random state as they were, and no gradients.

    Args:
        model: On the device where it will be trained. Not on the meta device.
        batches: At least two, on that device, with labels. The first one warms up.
        make_optimizer: Makes the optimizer of the trained weights with a learning rate of 0; AdamW by default.
        bf16: Compute under autocast to bfloat16.

    Returns:
        Seconds of each step but the first.

    Raises:
        ValueError: If the model has no real weights, or there are too few batches.
    """
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(weight.is_meta for weight in weights):
        raise ValueError("`model` must have real weights to be timed, got a model on the meta device.")
    if len(batches) < 2:
        raise ValueError(f"`batches` must be at least 2, of which one warms up, got {len(batches)}.")
    kind = weights[0].device.type
    optimizer = make_optimizer(weights) if make_optimizer else torch.optim.AdamW(weights, lr=0.0, weight_decay=0.0)
    was_training, seconds = model.training, []
    devices = [weights[0].device] if kind != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=kind if devices else "cuda"):
        model.train()
        for batch in batches:
            start = _now(kind)
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(_now(kind) - start)
    model.train(was_training)
    return seconds[1:]


def measure_flops_per_second(
    model: PreTrainedModel, batches: Sequence[Mapping[str, torch.Tensor]], is_checkpointed: bool = False, **options
) -> float:
    """The rate at which a device trains a model, as `estimate_run` takes it: the median of some real steps.

    Args:
        model: See `measure_step_seconds`, as for the batches and the options.
        batches: Such as the trainer will form.
        is_checkpointed: Whether the model computes layers again in the backward pass.
        **options: Further arguments of `measure_step_seconds`.
    """
    seconds = measure_step_seconds(model, batches, **options)
    flops = [training_flops(model, [BatchShape.of_tensors(batch)], is_checkpointed) for batch in batches[1:]]
    return statistics.median(done / taken for done, taken in zip(flops, seconds, strict=True))


def _now(kind: str) -> float:
    if kind != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()

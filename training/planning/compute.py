"""Floating-point operations of a training step, and the rate at which a device computes them."""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.training.planning.batches import BatchShape

# Cross-attention keys and values: decoder weights that are applied to source tokens. Names of Metaphrase, BART and T5.
_CROSS_PROJECTION = re.compile(r"\.(cross_attn|encoder_attn|EncDecAttention)\.(k|v|k_proj|v_proj)$")


def training_flops(model: PreTrainedModel, shapes: Sequence[BatchShape], is_checkpointed: bool = False) -> int:
    """Return the operations of forward and backward passes, a multiplication and an addition counted as two.

    Only matrix products are counted: 2 per weight of a projection and token, and 4 per attention score and entry of a head.
    Masked scores count too. A backward pass takes twice the forward pass, and once more with checkpoints.

    Source: Kaplan et al. 2020, section 2.1, arXiv 2001.08361.

    Args:
        model: An encoder-decoder.
        shapes: Shapes of the batches.
        is_checkpointed: True if layers are computed again in the backward pass.
    """
    source_tokens = sum(shape.source_tokens for shape in shapes)
    target_tokens = sum(shape.target_tokens for shape in shapes)
    head = model.get_output_embeddings()
    encoder_modules = {id(module) for module in model.get_encoder().modules()}
    layers = sum(_score_flops(model, shape) for shape in shapes)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            reads_source = id(module) in encoder_modules or _CROSS_PROJECTION.search(name)
            layers += 2 * module.weight.numel() * (source_tokens if reads_source else target_tokens)
    output = 0 if head is None else 2 * head.weight.numel() * target_tokens
    return (4 if is_checkpointed else 3) * layers + 3 * output


def _score_flops(model: PreTrainedModel, shape: BatchShape) -> int:
    config = model.config
    if not hasattr(config, "get_head_dim"):
        return 0  # Other families name their widths otherwise. A few per cent at the lengths of sentences.
    heads = {name: getattr(config, f"{name}_attention_heads") for name in ("encoder", "decoder")}
    encoder, decoder = (
        getattr(config, f"{name}_layers") * count * config.get_head_dim(count) for name, count in heads.items()
    )
    return 4 * (encoder * shape.source_scores + decoder * (shape.target_scores + shape.cross_scores))


def measure_step_seconds(
    model: PreTrainedModel,
    batches: Sequence[Mapping[str, torch.Tensor]],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    bf16: bool = False,
) -> list[float]:
    """Time real training steps. Weights and random state stay as they were, and no gradients remain.

    Args:
        model: Model on its training device, not on the meta device.
        batches: At least two batches on that device, with labels. The first one warms up.
        make_optimizer: Makes an optimizer with a learning rate of 0; AdamW by default.
        bf16: True to compute under autocast to bfloat16.

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
    """Return the median rate of real training steps, for `estimate_run`.

    Args:
        model: See `measure_step_seconds`.
        batches: Batches as the trainer will form them.
        is_checkpointed: True if the model computes layers again in the backward pass.
        **options: Further arguments of `measure_step_seconds`.
    """
    seconds = measure_step_seconds(model, batches, **options)
    flops = [training_flops(model, [BatchShape.of_tensors(batch)], is_checkpointed) for batch in batches[1:]]
    return statistics.median(count / duration for count, duration in zip(flops, seconds, strict=True))


def _now(kind: str) -> float:
    if kind != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()

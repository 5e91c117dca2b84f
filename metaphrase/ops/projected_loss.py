"""Cross-entropy of a linear projection in chunks, without all logits (Hsu et al. 2024, section 3.2, arXiv 2410.10989)."""

import torch
from torch import nn

from metaphrase.modeling.loss import IGNORED_LABEL
from metaphrase.ops.linear_and_dropout import is_hooked
from metaphrase.ops.packed_rows import product_dtype

# A chunk of logits should fit into the processor's caches. It needs enough rows to make up for adding the gradient of the
# projection once per chunk.
_CHUNK_ENTRIES = 2**21
_MIN_CHUNK_ROWS = 512
# Rows of the projection's gradient that are computed and added at a time, to stay in the caches.
_STRIP_ROWS = 2048


def loss_of_head(
    head: nn.Module, hidden_states: torch.Tensor, labels: torch.Tensor, *options: torch.Tensor | float
) -> torch.Tensor | None:
    """Return the `projected_loss` of states `(batch, target, hidden)` before `lm_head`, or None if the head must be called.

    A head with an adapter, hooks, or a quantized, pruned or offloaded weight must be called. Logits of float16 must be clamped.
    The options are those of `projected_loss`.
    """
    # A pruned weight is no parameter. DeepSpeed has a hook in each module to gather sharded weights.
    is_plain = type(head) is nn.Linear and "weight" in head._parameters
    if not is_plain or (is_hooked(head) and not hasattr(head.weight, "ds_id")) or hidden_states.dtype == torch.float16:
        return None
    return projected_loss(hidden_states.flatten(0, 1), head.weight, head.bias, labels.flatten(), *options)


def chunk_rows(vocab_size: int) -> int:
    """Return the number of tokens of a chunk, an even number."""
    rows = max(_MIN_CHUNK_ROWS, _CHUNK_ENTRIES // vocab_size)
    return rows + rows % 2


class _ProjectedLoss(torch.autograd.Function):
    """Sum of the cross-entropies. The forward pass computes the gradients, too, while it has the logits of a chunk."""

    @staticmethod
    def forward(
        ctx, hidden_states, weight, bias, labels, factors, divisor, smoothing: float, alpha: float, dtype: torch.dtype
    ):
        needs_gradient, vocab = ctx.needs_input_grad, weight.shape[0]
        states, matrix = hidden_states.to(dtype), weight.to(dtype)
        # Smoothing gives all tokens the same share. Its part of loss and gradients needs the sum of the weight's rows only.
        share = smoothing / vocab
        weight_sum = weight.float().sum(dim=0) if smoothing else None
        total_dtype = torch.float64 if states.device.type == "cpu" else torch.float32
        total = torch.zeros((), dtype=total_dtype, device=states.device)
        states_gradient = torch.empty_like(states) if needs_gradient[0] else None
        # The first chunk overwrites the gradient.
        make = torch.empty if states.shape[0] else torch.zeros
        weight_gradient = make(weight.shape, dtype=torch.float32, device=weight.device) if needs_gradient[1] else None
        bias_gradient = torch.zeros(vocab, dtype=torch.float32, device=weight.device) if needs_gradient[2] else None
        size = chunk_rows(vocab)
        for start in range(0, states.shape[0], size):
            chunk, mask = states[start : start + size], None if factors is None else factors[start : start + size]
            logits = chunk @ matrix.T if bias is None else torch.addmm(bias.to(dtype), chunk, matrix.T)
            index = torch.arange(chunk.shape[0], device=chunk.device), labels[start : start + size]
            label_logits, probabilities = logits[index].float(), torch.softmax(logits, dim=1)
            values, rest, is_likely = of_labels = _label_probabilities(probabilities, index)
            if logits.device.type == "cpu" and values.min() > torch.finfo(dtype).tiny:
                unlikely = -values.log()
            else:
                # The largest probability is at least 1 / vocab, so its logarithm is accurate. The maximum is slow on a CPU.
                unlikely = logits.amax(dim=1).float() - probabilities.amax(dim=1).float().log() - label_logits
            losses = torch.where(is_likely, -torch.log1p(-rest.clamp(max=0.5)), unlikely) + smoothing * label_logits
            if alpha:
                divergences, divergence_gradient = _pair_divergence(logits, probabilities, of_labels, index, alpha)
            del logits
            if smoothing:
                losses -= share * (chunk.float() @ weight_sum)
                if bias is not None:
                    losses -= share * bias.float().sum()
            if alpha:
                losses += divergences
            total += (losses if mask is None else losses * mask).sum()
            if not any(needs_gradient[:3]):
                continue
            # The probabilities become the gradient of the logits, without the part of smoothing.
            logits_gradient = probabilities
            label_share = 1 - smoothing
            logits_gradient[index] = torch.where(is_likely, 1 - label_share - rest, values - label_share).to(dtype)
            if alpha:
                logits_gradient += divergence_gradient
                del divergence_gradient
            if mask is not None:
                logits_gradient *= mask[:, None]
            if states_gradient is not None:
                states_gradient[start : start + size] = logits_gradient @ matrix
            if weight_gradient is not None:
                _add_product(weight_gradient, logits_gradient.T, chunk, is_first=start == 0)
            if bias_gradient is not None:
                bias_gradient += logits_gradient.sum(dim=0, dtype=torch.float32)
            # Free the chunk before the next chunk is computed.
            del probabilities, logits_gradient
        if smoothing:
            label_states = states if factors is None else states * factors[:, None]
            if states_gradient is not None:
                row = (share * weight_sum).to(dtype)
                states_gradient -= row if factors is None else row * factors[:, None]
            if weight_gradient is not None:
                weight_gradient -= share * label_states.sum(dim=0, dtype=torch.float32)
            if bias_gradient is not None:
                bias_gradient -= share * (states.shape[0] if factors is None else factors.sum())
        gradients = states_gradient, weight_gradient, bias_gradient
        ctx.divisor = divisor
        # In float16, a divided gradient may underflow before the scale of the loss multiplies it in the backward pass.
        if states.device.type == "cpu" and dtype != torch.float16:
            gradients = [None if gradient is None else gradient.div_(divisor) for gradient in gradients]
            ctx.divisor = 1
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype
        return (total / divisor).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        gradients, gradient = ctx.saved_tensors, gradient / ctx.divisor
        # Usually the factor is 1. Comparing would wait for an accelerator.
        if gradient.device.type != "cpu" or gradient != 1:
            gradients = [None if saved is None else saved * gradient.to(saved.dtype) for saved in gradients]
        pairs = zip(gradients, ctx.dtypes, strict=True)
        gradients = [None if saved is None else saved.to(dtype) for saved, dtype in pairs]
        return *gradients, None, None, None, None, None, None


def _label_probabilities(
    probabilities: torch.Tensor, index: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return probabilities of the labels, those of all other tokens together, and True for likely labels, `(rows)`.

    In half precision, `1 - p` is inaccurate if p is near 1, but the sum of the other probabilities is accurate.
    """
    values, dtype = probabilities[index], torch.promote_types(probabilities.dtype, torch.float32)
    probabilities[index] = 0
    # `sum` accumulates in float32 and rounds once. Converting the probabilities first takes far longer.
    rest = probabilities.sum(dim=1).to(dtype)
    probabilities[index] = values
    return values.to(dtype), rest, rest < 0.5


def _pair_divergence(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    of_labels: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    index: tuple[torch.Tensor, torch.Tensor],
    alpha: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of even and odd rows of a chunk, with the same labels, and its gradient.

    Their logits a and b have the probabilities p and q. KL(p, q) + KL(q, p) is the sum of (p - q)(a - b). The gradient for a is
    p - q + p (a - b - sum(p (a - b))). Adding a constant to a - b changes neither. So a - b is made 0 for the label, since p and
    q of a likely label are inaccurate. Half the divergence of a pair comes times alpha, `(rows)`.
    """
    p, q = probabilities[::2], probabilities[1::2]
    (label_p, label_q), (rest_p, rest_q), are_likely = ((part[::2], part[1::2]) for part in of_labels)
    index = index[0][: len(p)], index[1][::2]
    gap, difference = logits[::2] - logits[1::2], p - q
    gap -= gap[index][:, None]
    label_difference = torch.where(are_likely[0] & are_likely[1], rest_q - rest_p, label_p - label_q)
    difference[index] = label_difference.to(difference.dtype)
    divergence = 0.25 * alpha * (gap * difference).sum(dim=1, dtype=torch.float32)
    gradient = torch.empty_like(probabilities)
    torch.add(torch._softmax_backward_data(gap, p, -1, gap.dtype), difference, out=gradient[::2])
    torch.add(torch._softmax_backward_data(gap, q, -1, gap.dtype), difference, out=gradient[1::2]).neg_()
    return divergence.repeat_interleave(2), gradient.mul_(0.5 * alpha)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, is_first: bool) -> None:
    """Add a matrix product to a total in place. The first product replaces the total."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if is_first else 1, out=total)
        return
    rows = _STRIP_ROWS if total.device.type == "cpu" else len(total)
    for part, strip in zip(total.split(rows), left.split(rows), strict=True):
        product = strip @ right
        part.copy_(product) if is_first else part.add_(product)


def projected_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    smoothing: float = 0.0,
    r_drop_alpha: float = 0.0,
    divisor: torch.Tensor | float = 1,
    label_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits with `reduction="sum"`, divided, without storing all logits.

    The result is a scalar in float32, which can be differentiated once. The products are in the precision of autocast.

    Args:
        hidden_states, weight, bias: `(tokens, hidden)`, `(vocab, hidden)` and `(vocab)`.
        labels: `(tokens)`, -100 for tokens without a label.
        smoothing: Probability to spread over the vocabulary, in [0, 1).
        r_drop_alpha: Weight of the divergence of both halves of the tokens, which have the same labels.
        divisor: Divides the sum. Dividing here saves a pass over gradients as large as the projection.
        label_weights: Factors of the cross-entropies and divergences, as many as labels.
    """
    if label_weights is not None:
        label_weights = label_weights.flatten().to(hidden_states.device)
    if r_drop_alpha:
        # The rows of a pair become neighbours: (tokens, ...) -> (2, tokens / 2, ...) -> (tokens, ...)
        hidden_states, labels = (t.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for t in (hidden_states, labels))
        label_weights = None if label_weights is None else label_weights.view(2, -1).T.flatten()
    labels = labels.to(hidden_states.device)
    is_label, device_type = labels != IGNORED_LABEL, hidden_states.device.type
    if device_type != "cpu":
        # Removing tokens without a label would wait for the accelerator.
        labels, label_weights = labels.clamp(min=0), is_label if label_weights is None else is_label * label_weights
    elif not bool(is_label.all()):
        hidden_states, labels = hidden_states[is_label], labels[is_label]
        label_weights = None if label_weights is None else label_weights[is_label]
    dtype = product_dtype(hidden_states)
    with torch.autocast(device_type, enabled=False):
        return _ProjectedLoss.apply(
            hidden_states, weight, bias, labels, label_weights, divisor, smoothing, r_drop_alpha, dtype
        )

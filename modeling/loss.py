"""Decoder inputs from labels, and the loss: from logits, or in chunks from hidden states without storing all logits.

All code that shifts or counts labels uses this file.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .compat import softmax_gradient
from .packing import check_lengths

IGNORED_LABEL = -100
# A chunk of logits should fit into the processor's caches. It needs enough rows to make up for adding the gradient of the
# projection once per chunk.
_CHUNK_ENTRIES = 2**21
_MIN_CHUNK_ROWS = 512
# Rows of the projection's gradient that are computed and added at a time, to stay in the caches.
_STRIP_ROWS = 2048


def shift_right(
    labels: torch.Tensor,
    pad_token_id: int | None,
    decoder_start_token_id: int | None,
    target_lengths: torch.Tensor | None = None,
    start_from_labels: bool = False,
) -> torch.Tensor:
    """Make the decoder's input from labels: the start token, then all labels but the last.

    Args:
        labels: Ids `(batch, target)`, -100 at positions without a label.
        pad_token_id: Replaces -100.
        decoder_start_token_id: The start token.
        target_lengths: Tokens of each target in a packed row, `(targets)`. Each target gets a start token.
        start_from_labels: True to start with the last label of a target instead. This is a language code in mBART (Liu et al.
            2020, section 2.2, arXiv 2001.08210).

    Returns:
        Ids `(batch, target)`.

    Raises:
        ValueError: If a required id is None, or the lengths do not fit the row.
    """
    if target_lengths is not None:
        check_lengths(target_lengths, labels.shape[1])
    for field, value in (("decoder_start_token_id", decoder_start_token_id), ("pad_token_id", pad_token_id)):
        is_needed = field == "pad_token_id" or not start_from_labels
        if value is None and is_needed:
            raise ValueError(f"`{field}` must be set in the configuration to shift labels to the right, got None.")
    if start_from_labels:
        starts = _last_labels(labels, pad_token_id, target_lengths)
    else:
        starts = labels.new_full(
            labels.shape[:1] if target_lengths is None else target_lengths.shape, decoder_start_token_id
        )
    shifted = labels.roll(1, dims=1)
    if target_lengths is None:
        shifted[:, 0] = starts
    else:
        shifted[0, target_lengths.cumsum(0) - target_lengths] = starts
    return shifted.masked_fill(shifted == IGNORED_LABEL, pad_token_id)


def _last_labels(labels: torch.Tensor, pad_token_id: int, target_lengths: torch.Tensor | None) -> torch.Tensor:
    """Return the last label of each target, `(targets)`, or the first id of a target without labels."""
    is_label = (labels != IGNORED_LABEL) & (labels != pad_token_id)
    columns = torch.arange(labels.shape[1], device=labels.device)
    if target_lengths is None:
        return labels.gather(1, (columns * is_label).argmax(dim=1, keepdim=True))[:, 0]
    starts = target_lengths.cumsum(0) - target_lengths
    targets = torch.arange(len(starts), device=labels.device)
    targets = targets.repeat_interleave(target_lengths, output_size=labels.shape[1])
    last = starts.scatter_reduce(0, targets, torch.where(is_label[0], columns, starts[targets]), "amax")
    return labels[0, last]


def sequence_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the mean cross-entropy of the labels, in float32.

    Args:
        logits: `(batch, target, vocab)`.
        labels: Ids `(batch, target)`, -100 at positions without a label.
        num_items_in_batch: Number of labels in all batches of an optimizer step. Dividing by this number makes the losses of
            accumulated batches add up to the loss of one large batch. None divides by the labels of this batch.
        label_smoothing: Probability to spread over the vocabulary, in [0, 1) (Szegedy et al. 2016, section 7, arXiv 1512.00567).

    Returns:
        A scalar, 0 without labels.
    """
    labels = labels.to(logits.device)
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total / num_items(labels, num_items_in_batch, total.device)


def num_items(
    labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None, device: torch.device
) -> torch.Tensor | int:
    """Return the divisor of a summed loss, at least 1: `num_items_in_batch`, or else the number of labels."""
    if num_items_in_batch is None:
        return (labels != IGNORED_LABEL).sum().clamp(min=1).to(device)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(device).clamp(min=1)
    return max(num_items_in_batch, 1)


def check_halves(labels: torch.Tensor) -> None:
    """Check that the second half of the labels `(labels,)` equals the first half.

    Raises:
        ValueError: If the halves differ. On an accelerator only the number is checked, since values would have to wait.
    """
    half = labels.shape[0] // 2
    is_even = labels.shape[0] == 2 * half
    if not is_even or (labels.device.type == "cpu" and not torch.equal(labels[:half], labels[half:])):
        raise ValueError("With `r_drop_alpha`, the second half of a batch must be the first again, got other labels.")


def symmetric_divergence(
    first_logits: torch.Tensor, second_logits: torch.Tensor, labels: torch.Tensor, labels_per_chunk: int = 512
) -> torch.Tensor:
    """Return half the sum of both Kullback-Leibler divergences of two predictions, summed over the labels, in float32.

    Gradient checkpointing keeps only one chunk of probabilities in memory.

    Source: Liang et al. 2021, equation 2, arXiv 2106.14448.

    Args:
        first_logits: `(labels, vocab)`.
        second_logits: `(labels, vocab)`.
        labels: `(labels,)`, -100 to ignore a row of the logits.
        labels_per_chunk: Number of rows of a chunk.

    Returns:
        A scalar, in nats, with gradients for both predictions.
    """
    total = torch.zeros((), dtype=torch.float32, device=first_logits.device)
    is_label = (labels != IGNORED_LABEL).to(first_logits.device)
    chunks = (tensor.split(labels_per_chunk) for tensor in (first_logits, second_logits, is_label))
    for chunk in zip(*chunks, strict=True):
        total = total + checkpoint(_divergence, *chunk, use_reentrant=False, preserve_rng_state=False)
    return total


def divergence_of_halves(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the `symmetric_divergence` of the two halves of logits `(labels, vocab)` with labels `(labels,)`."""
    check_halves(labels)
    first, second = logits.chunk(2)
    return symmetric_divergence(first, second, labels[: len(first)])


def _divergence(first_logits: torch.Tensor, second_logits: torch.Tensor, is_label: torch.Tensor) -> torch.Tensor:
    # Ignored rows become zeros, since infinite logits would give NaN even with a weight of 0.
    first, second = (
        nn.functional.log_softmax(torch.where(is_label[:, None], logits, 0.0).float(), dim=-1)
        for logits in (first_logits, second_logits)
    )
    # KL(p, q) + KL(q, p) is the sum of (p - q)(log p - log q).
    return 0.5 * ((first.exp() - second.exp()) * (first - second)).sum()


def chunk_rows(vocab_size: int) -> int:
    """Return the number of tokens of a chunk, an even number."""
    rows = max(_MIN_CHUNK_ROWS, _CHUNK_ENTRIES // vocab_size)
    return rows + rows % 2


class _ProjectedLoss(torch.autograd.Function):
    """Sum of the cross-entropies. The forward pass computes the gradients, too, while it has the logits of a chunk."""

    @staticmethod
    def forward(
        ctx, hidden_states, weight, bias, labels, is_label, divisor, smoothing: float, alpha: float, dtype: torch.dtype
    ):
        needs_gradient = ctx.needs_input_grad
        vocab = weight.shape[0]
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
            chunk, chunk_labels = states[start : start + size], labels[start : start + size]
            mask = None if is_label is None else is_label[start : start + size]
            logits = chunk @ matrix.T if bias is None else torch.addmm(bias.to(dtype), chunk, matrix.T)
            rows = torch.arange(chunk.shape[0], device=chunk.device)
            label_logits = logits[rows, chunk_labels].float()
            probabilities = torch.softmax(logits, dim=1)
            label_probabilities = _LabelProbabilities(probabilities, rows, chunk_labels)
            losses = label_probabilities.surprisals(logits, probabilities, label_logits) + smoothing * label_logits
            if alpha:
                divergences, divergence_gradient = _pair_divergence(
                    logits, probabilities, label_probabilities, rows, chunk_labels, alpha
                )
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
            logits_gradient[rows, chunk_labels] = label_probabilities.minus(1 - smoothing).to(dtype)
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
            label_states = states if is_label is None else states * is_label[:, None]
            if states_gradient is not None:
                row = (share * weight_sum).to(dtype)
                states_gradient -= row if is_label is None else row * is_label[:, None]
            if weight_gradient is not None:
                weight_gradient -= share * label_states.sum(dim=0, dtype=torch.float32)
            if bias_gradient is not None:
                bias_gradient -= share * (states.shape[0] if is_label is None else is_label.sum())
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


class _LabelProbabilities:
    """Probabilities of the labels, and of all other tokens together, `(rows)`.

    In half precision, `1 - p` is inaccurate if p is near 1, but the sum of the other probabilities is accurate.
    """

    def __init__(self, probabilities: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor):
        values, dtype = probabilities[rows, labels], torch.promote_types(probabilities.dtype, torch.float32)
        probabilities[rows, labels] = 0
        # `sum` accumulates in float32 and rounds once. Converting the probabilities first takes far longer.
        self.rest = probabilities.sum(dim=1).to(dtype)
        probabilities[rows, labels] = values
        self.values, self.is_likely = values.to(dtype), self.rest < 0.5

    def minus(self, share: float) -> torch.Tensor:
        """Return the probabilities minus a share, `(rows)`."""
        return torch.where(self.is_likely, 1 - share - self.rest, self.values - share)

    def difference(self) -> torch.Tensor:
        """Return the probabilities of even rows minus those of odd rows, `(rows / 2)`."""
        (p, q), (rest_p, rest_q) = ((tensor[::2], tensor[1::2]) for tensor in (self.values, self.rest))
        are_likely = self.is_likely[::2] & self.is_likely[1::2]
        return torch.where(are_likely, rest_q - rest_p, p - q)

    def surprisals(self, logits: torch.Tensor, probabilities: torch.Tensor, label_logits: torch.Tensor) -> torch.Tensor:
        """Return the negative logarithms of the probabilities, `(rows)`."""
        if logits.device.type == "cpu" and self.values.min() > torch.finfo(probabilities.dtype).tiny:
            unlikely = -self.values.log()
        else:
            # The largest probability is at least 1 / vocab, so its logarithm is accurate. The maximum is slow on a CPU.
            unlikely = logits.amax(dim=1).float() - probabilities.amax(dim=1).float().log() - label_logits
        return torch.where(self.is_likely, -torch.log1p(-self.rest.clamp(max=0.5)), unlikely)


def _pair_divergence(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    label_probabilities: _LabelProbabilities,
    rows: torch.Tensor,
    labels: torch.Tensor,
    alpha: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of even and odd rows of a chunk, with the same labels.

    Their logits a and b have the probabilities p and q. KL(p, q) + KL(q, p) is the sum of (p - q)(a - b). The gradient for a is
    p - q + p (a - b - sum(p (a - b))). Adding a constant to a - b changes neither. So a - b is made 0 for the label, since p and
    q of a likely label are inaccurate.

    Returns:
        Half the divergence of a pair of rows, times alpha, `(rows)`, and the gradient of the logits, `(rows, vocab)`.
    """
    p, q = probabilities[::2], probabilities[1::2]
    index = rows[: len(p)], labels[::2]
    gap, difference = logits[::2] - logits[1::2], p - q
    gap -= gap[index][:, None]
    difference[index] = label_probabilities.difference().to(difference.dtype)
    divergence = 0.25 * alpha * (gap * difference).sum(dim=1, dtype=torch.float32)
    gradient = torch.empty_like(probabilities)
    torch.add(softmax_gradient(gap, p), difference, out=gradient[::2])
    torch.add(softmax_gradient(gap, q), difference, out=gradient[1::2]).neg_()
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
) -> torch.Tensor:
    """Return the sum of the cross-entropies of a linear projection, divided, without storing all logits.

    Equal to `torch.nn.functional.cross_entropy` of the logits with `reduction="sum"`, divided by `divisor`. The matrix products
    are in the precision of autocast.

    Source: gradients by chunks in the forward pass are from Hsu et al. 2024, section 3.2, arXiv 2410.10989.

    Args:
        hidden_states: `(tokens, hidden)`.
        weight: `(vocab, hidden)`.
        bias: `(vocab)`.
        labels: `(tokens)`, -100 for tokens without a label.
        smoothing: Probability to spread over the vocabulary, in [0, 1).
        r_drop_alpha: Weight of the `symmetric_divergence` between the two halves of the tokens, which have the same labels.
        divisor: Divides the sum. Dividing here saves a pass over gradients as large as the projection.

    Returns:
        A scalar in float32, which can be differentiated once.

    Raises:
        ValueError: If the halves have different labels, or `smoothing` is out of range.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"`smoothing` must be at least 0 and below 1, got {smoothing}.")
    if r_drop_alpha:
        check_halves(labels)
        # The rows of a pair become neighbours: (tokens, ...) -> (2, tokens / 2, ...) -> (tokens, ...)
        hidden_states, labels = (t.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for t in (hidden_states, labels))
    labels = labels.to(hidden_states.device)
    is_label = labels != IGNORED_LABEL
    device_type = hidden_states.device.type
    if device_type != "cpu":
        # Removing tokens without a label would wait for the accelerator.
        labels = labels.clamp(min=0)
    elif bool(is_label.all()):
        is_label = None
    else:
        hidden_states, labels, is_label = hidden_states[is_label], labels[is_label], None
    is_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else hidden_states.dtype
    with torch.autocast(device_type, enabled=False):
        return _ProjectedLoss.apply(
            hidden_states, weight, bias, labels, is_label, divisor, smoothing, r_drop_alpha, dtype
        )

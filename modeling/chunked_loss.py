"""The loss straight from hidden states: projection and cross-entropy in chunks, so that the logits never exist as a whole."""

from collections.abc import Iterator

import torch

from .compat import softmax_gradient
from .loss import IGNORED_LABEL, check_halves

# Logits of one chunk: few enough to stay near the processor, enough rows that adding a chunk's gradient to that of the whole
# projection takes little beside its products.
_CHUNK_ENTRIES = 2**21
_MIN_CHUNK_ROWS = 512
# Rows of a chunk's share in the gradient of the projection: few enough to stay near the processor until they are added.
_STRIP_ROWS = 2048


def chunk_rows(vocab_size: int) -> int:
    """Tokens whose logits exist at a time."""
    return max(_MIN_CHUNK_ROWS, _CHUNK_ENTRIES // vocab_size)


class _ProjectedLoss(torch.autograd.Function):
    """Sum of the cross-entropies, with the gradients computed in the forward pass, while each chunk of logits is at hand."""

    @staticmethod
    def forward(
        ctx, hidden_states, weight, bias, labels, is_label, divisor, smoothing: float, alpha: float, dtype: torch.dtype
    ):
        needed = ctx.needs_input_grad
        vocab = weight.shape[0]
        states, matrix = hidden_states.to(dtype), weight.to(dtype)
        # Smoothing gives every entry of the vocabulary the same small share. What that adds to loss and gradients are
        # products with one row, which need no pass over the logits.
        share = smoothing / vocab
        weight_sum = weight.float().sum(dim=0) if smoothing else None
        total = torch.zeros(
            (), dtype=torch.float64 if states.device.type == "cpu" else torch.float32, device=states.device
        )
        states_gradient = torch.empty_like(states) if needed[0] else None
        # The first chunk fills it, if there is one.
        make = torch.empty if states.shape[0] else torch.zeros
        weight_gradient = make(weight.shape, dtype=torch.float32, device=weight.device) if needed[1] else None
        bias_gradient = torch.zeros(vocab, dtype=torch.float32, device=weight.device) if needed[2] else None
        for places in _chunks(states.shape[0], chunk_rows(vocab), is_twice=alpha != 0):
            chunk, chunk_labels = _take(states, places), _take(labels, places)
            kept = None if is_label is None else _take(is_label, places)
            logits = chunk @ matrix.T if bias is None else torch.addmm(bias.to(dtype), chunk, matrix.T)
            rows = torch.arange(chunk.shape[0], device=chunk.device)
            chosen = logits[rows, chunk_labels].float()
            probabilities = torch.softmax(logits, dim=1)
            of_labels = _LabelProbabilities(probabilities, rows, chunk_labels)
            losses = of_labels.surprisals(logits, probabilities, chosen) + smoothing * chosen
            if alpha:
                divergences, slope = _divergence(logits, probabilities, of_labels, rows, chunk_labels, alpha)
            del logits
            if smoothing:
                losses -= share * (chunk.float() @ weight_sum)
                if bias is not None:
                    losses -= share * bias.float().sum()
            if alpha:
                losses += divergences
            total += (losses if kept is None else losses * kept).sum()
            if not any(needed[:3]):
                continue
            # From here on they are the gradient of the logits, but for what smoothing adds.
            probabilities[rows, chunk_labels] = of_labels.less(1 - smoothing).to(dtype)
            if alpha:
                probabilities += slope
                del slope
            if kept is not None:
                probabilities *= kept[:, None]
            if states_gradient is not None:
                _put(states_gradient, places, probabilities @ matrix)
            if weight_gradient is not None:
                _add_product(weight_gradient, probabilities.T, chunk, is_first=places[0].start == 0)
            if bias_gradient is not None:
                bias_gradient += probabilities.sum(dim=0, dtype=torch.float32)
            del probabilities  # before the next are there
        if smoothing:
            counted = states if is_label is None else states * is_label[:, None]
            if states_gradient is not None:
                row = (share * weight_sum).to(dtype)
                states_gradient -= row if is_label is None else row * is_label[:, None]
            if weight_gradient is not None:
                weight_gradient -= share * counted.sum(dim=0, dtype=torch.float32)
            if bias_gradient is not None:
                bias_gradient -= share * (states.shape[0] if is_label is None else is_label.sum())
        gradients = states_gradient, weight_gradient, bias_gradient
        ctx.divisor = divisor
        # What is divided in float16 may be too small for it, until a scaled loss is multiplied in.
        if states.device.type == "cpu" and dtype != torch.float16:
            # In its place, as long as it is nobody else's.
            gradients = [None if gradient is None else gradient.div_(divisor) for gradient in gradients]
            ctx.divisor = 1
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype
        return (total / divisor).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        gradients, gradient = ctx.saved_tensors, gradient / ctx.divisor
        # As a rule it is the loss itself that is differentiated. To ask would be to wait for an accelerator.
        if gradient.device.type != "cpu" or gradient != 1:
            gradients = [None if kept is None else kept * gradient.to(kept.dtype) for kept in gradients]
        gradients = [
            None if kept is None else kept.to(dtype) for kept, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None, None, None, None, None


class _LabelProbabilities:
    """Probability of each row's label, and of all else, `(rows)`: in half precision the one says nothing of the other near 1.

    Numbers of bfloat16 below 1 are 0.004 apart, but small ones keep their digits: a label of more than one half is what the sum
    of the others leaves.
    """

    def __init__(self, probabilities: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor):
        found, dtype = probabilities[rows, labels], torch.promote_types(probabilities.dtype, torch.float32)
        probabilities[rows, labels] = 0
        # Summed in float32, and rounded to as many digits as its terms have: to convert them all first takes far longer.
        self.rest = probabilities.sum(dim=1).to(dtype)
        probabilities[rows, labels] = found
        self.found, self.is_likely = found.to(dtype), self.rest < 0.5

    def less(self, share: float) -> torch.Tensor:
        """Their probabilities less a share."""
        return torch.where(self.is_likely, 1 - share - self.rest, self.found - share)

    def difference(self) -> torch.Tensor:
        """Those of the first half of the rows less those of the second, `(rows / 2)`."""
        (p, q), (rest_p, rest_q) = self.found.chunk(2), self.rest.chunk(2)
        are_likely = torch.logical_and(*self.is_likely.chunk(2))
        return torch.where(are_likely, rest_q - rest_p, p - q)

    def surprisals(self, logits: torch.Tensor, probabilities: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Negative logarithms, where `chosen` are the logits of the labels."""
        if logits.device.type == "cpu" and self.found.min() > torch.finfo(probabilities.dtype).tiny:
            unlikely = -self.found.log()
        else:
            # The largest probability is at least 1 / vocab, so its logarithm is exact; on a CPU, to find it is slow.
            unlikely = logits.amax(dim=1).float() - probabilities.amax(dim=1).float().log() - chosen
        return torch.where(self.is_likely, -torch.log1p(-self.rest.clamp(max=0.5)), unlikely)


def _chunks(total: int, rows: int, is_twice: bool) -> Iterator[tuple[slice, ...]]:
    """Places of about so many rows; where the second half of all is the first again, of as many rows of each half."""
    period, rows = (total // 2, max(1, rows // 2)) if is_twice else (total, rows)
    for start in range(0, period, rows):
        place = slice(start, min(start + rows, period))
        yield (place, slice(period + place.start, period + place.stop)) if is_twice else (place,)


def _take(tensor: torch.Tensor, places: tuple[slice, ...]) -> torch.Tensor:
    return tensor[places[0]] if len(places) == 1 else torch.cat([tensor[place] for place in places])


def _put(tensor: torch.Tensor, places: tuple[slice, ...], rows: torch.Tensor) -> None:
    for place, part in zip(places, rows.chunk(len(places)), strict=True):
        tensor[place] = part


def _divergence(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    of_labels: _LabelProbabilities,
    rows: torch.Tensor,
    labels: torch.Tensor,
    alpha: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row half of its pair's divergence times alpha, `(rows)`, and the gradient of the logits, `(rows, vocab)`.

    Rows are two halves, p and q, of the same labels. KL(p, q) + KL(q, p) is the sum of (p - q)(a - b) over logits a and b, since
    what normalizes them falls out, and its gradient for a is p - q + p (a - b - sum(p (a - b))). A constant falls out of a - b as
    well: that of the label, whose probabilities may be too near to 1 to tell them apart, is made 0.
    """
    (first, second), (p, q) = logits.chunk(2), probabilities.chunk(2)
    places = rows[: len(p)], labels[: len(p)]
    gap, difference = first - second, p - q
    gap -= gap[places][:, None]
    difference[places] = of_labels.difference().to(difference.dtype)
    each = 0.25 * alpha * (gap * difference).sum(dim=1, dtype=torch.float32)
    slopes = [softmax_gradient(gap, side) for side in (p, q)]
    slope = torch.cat((slopes[0].add_(difference), slopes[1].add_(difference).neg_())).mul_(0.5 * alpha)
    return torch.cat((each, each)), slope


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, is_first: bool) -> None:
    """Adds a product to a total, which it replaces if it is the first."""
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
    """The sum of the label-smoothed cross-entropies of a projection, without all of its logits at once.

    Equal to `torch.nn.functional.cross_entropy` on the logits, with `reduction="sum"`, divided. `linear_cross_entropy` of torch
    2.13 does the same without smoothing. Under autocast the matrix products are in its precision, as those of any linear layer.

    Source: computing the gradient chunk by chunk in the forward pass is from Hsu et al. 2024, section 3.2, arXiv 2410.10989.

    Args:
        hidden_states: `(tokens, hidden)`.
        weight: `(vocab, hidden)`.
        bias: `(vocab)`.
        labels: `(tokens)`, -100 where there is none; such tokens are left out of all products.
        smoothing: Probability to spread over the vocabulary, in [0, 1).
        r_drop_alpha: Weight of the `symmetric_divergence` that is added, between the predictions of the first and the second half
            of the tokens, which have the same labels then.
        divisor: Of the sum. To divide here spares a pass over all gradients, one of which is as large as the projection.

    Returns:
        A scalar in float32; it can be differentiated once.

    Raises:
        ValueError: If the halves have different labels, or `smoothing` is out of range.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"`smoothing` must be at least 0 and below 1, got {smoothing}.")
    if r_drop_alpha:
        check_halves(labels)
    labels = labels.to(hidden_states.device)
    is_label = labels != IGNORED_LABEL
    kind = hidden_states.device.type
    if kind != "cpu":
        # To count them would be to wait for the accelerator.
        labels = labels.clamp(min=0)
    elif bool(is_label.all()):
        is_label = None
    else:
        hidden_states, labels, is_label = hidden_states[is_label], labels[is_label], None
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype
    with torch.autocast(kind, enabled=False):
        return _ProjectedLoss.apply(
            hidden_states, weight, bias, labels, is_label, divisor, smoothing, r_drop_alpha, dtype
        )

"""Products of one row, many of whose entries are zero, as weighted sums of a weight's rows: those for zeros are not read."""

import torch

# Fewer rows cost more to find than to read.
_LEAST_SIZE = 2**19
# Rows here and there are read more slowly than all of them in order.
_MOST_ENTRIES = 0.5
# Of a row, for each thread; less is not worth one.
_LEAST_WIDTH = 128


def gains_by_zeros(weight: torch.Tensor) -> bool:
    """Whether a weight in float32 is large enough, and torch has FBGEMM's kernels for such sums on this processor."""
    return weight.numel() >= _LEAST_SIZE and "fbgemm" in torch.backends.quantized.supported_engines


def sum_rows(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """The product of a row with few entries, `(1, in_features)`, and a contiguous weight, `(in_features, out_features)`.

    Returns:
        `(1, out_features)`, through which no gradient passes; `None` where the row has so many entries that the whole
        product takes no longer.

    Source: how few entries a ReLU leaves in a trained Transformer is told by Li et al. 2023, arXiv 2210.06313.
    """
    in_features, out_features = weight.shape
    array = row.detach()[0].numpy()
    # NumPy finds them in a third of the time that torch takes.
    (found,) = (array != 0).nonzero()
    if len(found) > _MOST_ENTRIES * in_features:
        return None
    places, factors = torch.from_numpy(found), torch.from_numpy(array[found])
    # Each part of a row is a row to the kernel, so that threads share the work.
    parts = _parts(out_features)
    starts = torch.arange(parts)
    if parts > 1:
        places, factors = (places * parts + starts[:, None]).flatten(), factors.repeat(parts)
    rows = weight.view(in_features * parts, -1)
    return torch.embedding_bag(rows, places, starts * len(found), False, 0, False, factors)[0].view(1, -1)


def _parts(width: int) -> int:
    most = max(1, min(torch.get_num_threads(), width // _LEAST_WIDTH))
    return next(count for count in range(most, 0, -1) if width % count == 0)

"""Evaluation mode, for as long as something is decoded."""

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode; the modes that were there before are put back, those of parts too, such as a frozen encoder's."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        # Modules come before their parts, which then are set right. A decoder has more to do than to note its mode.
        for module, was_training in modes:
            if module.training != was_training:
                module.train(was_training)

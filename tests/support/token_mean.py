"""Helpers shared by several tests: token mean."""

from torch import nn

from metaphrase.modeling import IGNORED_LABEL


def token_mean(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total / num_items_in_batch

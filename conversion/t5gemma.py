"""T5Gemma (Zhang et al. 2025, arXiv 2504.06225): a family that does not fit, and which of its parts do not."""

from collections.abc import Iterator

from transformers import PreTrainedConfig


def obstacles(theirs: PreTrainedConfig) -> Iterator[str]:
    """What a T5Gemma uses that Metaphrase has not, each as a part of a sentence.

    Rotary positions, grouped queries, the gated feed-forward and the width of the heads do fit.
    """
    yield "every sub-layer has a norm before and one after it"
    yield "its norms multiply by 1 + weight"
    for name in ("encoder", "decoder"):
        stack = getattr(theirs, name)
        if stack.attn_logit_softcapping is not None:
            yield f"`{name}.attn_logit_softcapping` is {stack.attn_logit_softcapping}"
        if stack.final_logit_softcapping is not None and name == "decoder":
            yield f"`{name}.final_logit_softcapping` is {stack.final_logit_softcapping}"
        if "sliding_attention" in (stack.layer_types or ()):
            yield f"`{name}.layer_types` has sliding_attention, of {stack.sliding_window} tokens"
    if theirs.encoder.hidden_size != theirs.decoder.hidden_size:
        sizes = f"{theirs.encoder.hidden_size} and {theirs.decoder.hidden_size}"
        yield f"`encoder.hidden_size` and `decoder.hidden_size` are {sizes}"

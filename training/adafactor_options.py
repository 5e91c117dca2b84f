"""Adafactor's own options, which the Trainer fixes: `optim: adafactor` with `optim_args: scale_parameter=true`.

With it an update is in proportion to the root mean square of the weights that it changes, as T5 was trained: its projections
begin a hundred times smaller than its embeddings, and one learning rate is too large for the ones or too small for the others.

Source: Shazeer and Stern 2018, sections 8 and 9, arXiv 1804.04235.
"""

from transformers import PreTrainedModel, Trainer, TrainingArguments

_TRUTHS = {"true": True, "false": False}
# By the name of each: how its value is read, and how that is said.
_READERS = {
    "scale_parameter": (lambda word: _TRUTHS[word.lower()], "true or false"),
    "clip_threshold": (float, "a number"),
    "decay_rate": (float, "a number"),
}


def adafactor_options(optim_args: str | None) -> dict[str, bool | float]:
    """Reads `name=value,...`.

    Raises:
        ValueError: If a name is not known, or a value is not of its kind.
    """
    options = {}
    for part in (optim_args or "").replace(" ", "").split(","):
        if not part:
            continue
        name, _, value = part.partition("=")
        if name not in _READERS:
            raise ValueError(f"`optim_args` of adafactor must be some of {', '.join(_READERS)}, got {part!r}.")
        read, kind = _READERS[name]
        try:
            options[name] = read(value)
        except (KeyError, ValueError):
            raise ValueError(f"`{name}` in `optim_args` must be {kind}, got {value!r}.") from None
    return options


class AdafactorOptionsMixin:
    """For a trainer, before its parents: the optimizer's class and options, with those of Adafactor as they are given."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: PreTrainedModel | None = None) -> tuple:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if getattr(args.optim, "value", args.optim) == "adafactor":
            options |= adafactor_options(args.optim_args)
        return optimizer_class, options

"""Network and pipelines, which travel to the Hub with a model.

Importing this package registers the models with transformers' Auto classes.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)

from metaphrase.plugins import plugin
from metaphrase.presets import from_preset, preset_names

from .configuration_metaphrase import MetaphraseConfig
from .loss import IGNORED_LABEL, sequence_loss, shift_right
from .modeling_metaphrase import (
    MetaphraseEncoderModel,
    MetaphraseForConditionalGeneration,
    MetaphraseForQuestionAnswering,
    MetaphraseForSequenceClassification,
    MetaphraseForTokenClassification,
    MetaphraseModel,
)

AutoConfig.register(MetaphraseConfig.model_type, MetaphraseConfig, exist_ok=True)
for _auto_class, _model_class in (
    # transformers takes the class that a configuration names, or else the first.
    (AutoModel, (MetaphraseModel, MetaphraseEncoderModel)),
    (AutoModelForSeq2SeqLM, MetaphraseForConditionalGeneration),
    (AutoModelForTextEncoding, MetaphraseEncoderModel),
    (AutoModelForSequenceClassification, MetaphraseForSequenceClassification),
    (AutoModelForTokenClassification, MetaphraseForTokenClassification),
    (AutoModelForQuestionAnswering, MetaphraseForQuestionAnswering),
):
    _auto_class.register(MetaphraseConfig, _model_class, exist_ok=True)

__all__ = ["IGNORED_LABEL", "MetaphraseConfig", "MetaphraseEncoderModel", "MetaphraseForConditionalGeneration"]
__all__ += ["MetaphraseForQuestionAnswering", "MetaphraseForSequenceClassification", "MetaphraseForTokenClassification"]
__all__ += ["MetaphraseModel", "sequence_loss", "shift_right"]

# The package plugs its presets and its faster code in. A copy on the Hub has the files of this folder without `__init__.py`.
MetaphraseConfig.presets = staticmethod(preset_names)
MetaphraseConfig.from_preset = classmethod(from_preset)
for _place in ("training_operators", "fast_decoder"):
    _plug_in = plugin(_place)
    if _plug_in is not None:
        _plug_in()

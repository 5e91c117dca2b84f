"""Network and pipelines, which travel to the Hub with a model.

Importing this package registers the models with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding

from metaphrase.plugins import plugin
from metaphrase.presets import from_preset, preset_names

from .configuration_metaphrase import MetaphraseConfig
from .loss import IGNORED_LABEL, sequence_loss, shift_right
from .modeling_metaphrase import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

AutoConfig.register(MetaphraseConfig.model_type, MetaphraseConfig, exist_ok=True)
AutoModel.register(MetaphraseConfig, MetaphraseModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(MetaphraseConfig, MetaphraseForConditionalGeneration, exist_ok=True)
AutoModelForTextEncoding.register(MetaphraseConfig, MetaphraseEncoderModel, exist_ok=True)

__all__ = ["IGNORED_LABEL", "MetaphraseConfig", "MetaphraseEncoderModel", "MetaphraseForConditionalGeneration"]
__all__ += ["MetaphraseModel", "sequence_loss", "shift_right"]

# The package plugs its presets and its faster code in. A copy on the Hub has the files of this folder without `__init__.py`.
MetaphraseConfig.presets = staticmethod(preset_names)
MetaphraseConfig.from_preset = classmethod(from_preset)
for _place in ("training_operators", "fast_decoder"):
    _plug_in = plugin(_place)
    if _plug_in is not None:
        _plug_in()

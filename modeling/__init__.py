"""Network and pipelines, which travel to the Hub with a model.

Importing this package registers the models with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding

from .configuration_metaphrase import MetaphraseConfig
from .loss import IGNORED_LABEL, sequence_loss, shift_right
from .modeling_metaphrase import MetaphraseEncoderModel, MetaphraseForConditionalGeneration, MetaphraseModel

AutoConfig.register(MetaphraseConfig.model_type, MetaphraseConfig, exist_ok=True)
AutoModel.register(MetaphraseConfig, MetaphraseModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(MetaphraseConfig, MetaphraseForConditionalGeneration, exist_ok=True)
AutoModelForTextEncoding.register(MetaphraseConfig, MetaphraseEncoderModel, exist_ok=True)

__all__ = ["IGNORED_LABEL", "MetaphraseConfig", "MetaphraseEncoderModel", "MetaphraseForConditionalGeneration"]
__all__ += ["MetaphraseModel", "sequence_loss", "shift_right"]

# The package plugs its faster code in. A copy on the Hub has the files of this folder without `__init__.py`, and no faster code.
import metaphrase.decoding  # noqa: E402
import metaphrase.ops  # noqa: E402, F401

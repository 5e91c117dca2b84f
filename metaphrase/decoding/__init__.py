"""The fast decoder. Importing this package plugs it into the network and into `generate()`."""

from metaphrase.decoding import fast_generation, prepacked_weights
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.modeling.operators import acceleration

acceleration.encoding = prepacked_weights.prepacked
acceleration.encode_without_padding = prepacked_weights.encode_without_padding
acceleration.on_train = prepacked_weights.free_copies
# `generate()` of all Metaphrase models calls this function.
MetaphraseForConditionalGeneration._sample = MetaphraseForConditionalGeneration._beam_search = fast_generation.generate

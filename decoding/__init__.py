"""The fast decoder: `install` plugs it into the network and into `generate()`."""

from metaphrase.decoding import fast_generation, prepacked_weights
from metaphrase.modeling.acceleration import acceleration


def install() -> None:
    """Let encoders run with prepacked weights and without padding, and `generate()` run the fast loops."""
    acceleration.encoding = prepacked_weights.prepacked
    acceleration.encode_without_padding = prepacked_weights.encode_without_padding
    acceleration.on_train = prepacked_weights.free_copies
    fast_generation.install()

"""The fast decoder: `install` plugs it into the network and into `generate()`."""

from metaphrase.decoding import fast_generation, prepacked_weights, unpadded_encoding, weight_copies
from metaphrase.modeling.acceleration import acceleration


def install() -> None:
    """Let encoders run with prepacked weights and without padding, and `generate()` run the fast loops."""
    acceleration.encoding = prepacked_weights.prepacked
    acceleration.encode_without_padding = unpadded_encoding.encode_without_padding
    acceleration.on_train = weight_copies.free_copies
    fast_generation.install()

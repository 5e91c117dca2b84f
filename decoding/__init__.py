"""The fast decoder: `install` plugs it into the network and into `generate()`."""

from metaphrase.decoding import fast_generation, prepacked_weights, prepared_decoder, unpadded_encoding
from metaphrase.modeling.acceleration import acceleration
from metaphrase.modeling.stacks import Stack


def install() -> None:
    """Let encoders run with prepacked weights and without padding, and `generate()` run the fast loops."""
    acceleration.encoding = prepacked_weights.prepacked
    acceleration.encode_without_padding = unpadded_encoding.encode_without_padding
    acceleration.on_train = free_copies
    fast_generation.install()


def free_copies(stack: Stack) -> None:
    """Free the copies of a stack's weights: training needs the memory and will change the weights."""
    prepacked_weights.forget_prepacked(stack)
    prepared_decoder.forget_copies(stack)

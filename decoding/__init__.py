"""The fast decoder: `install` plugs it into the network and into `generate()`."""

from metaphrase.decoding import fast_generation
from metaphrase.decoding.prepacked_weights import forget_packed, packed_weights
from metaphrase.decoding.prepared_decoder import forget_copies
from metaphrase.decoding.unpadded_encoding import encode_without_padding
from metaphrase.modeling.acceleration import acceleration
from metaphrase.modeling.stacks import Stack


def install() -> None:
    """Let encoders run with prepacked weights and without padding, and `generate()` run the fast loops."""
    acceleration.encoding = packed_weights
    acceleration.encode_without_padding = encode_without_padding
    acceleration.on_train = free_copies
    fast_generation.install()


def free_copies(stack: Stack) -> None:
    """Free the copies of a stack's weights: training needs the memory and will change the weights."""
    forget_packed(stack)
    forget_copies(stack)

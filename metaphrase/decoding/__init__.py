"""The fast decoder. `plug_in` of `fast_generation` puts it into the network and into `generate()`."""

import metaphrase.modeling  # noqa: F401 (plugs in)

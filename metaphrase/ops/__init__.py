"""Faster operators for training, and packed rows. `plug_in` of `packed_stacks` puts them into the network.

The package is not called kernels: from a clone, such a folder hides the package `kernels`, which transformers imports.
"""

import metaphrase.modeling  # noqa: F401 (plugs in)

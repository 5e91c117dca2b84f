"""Sequence-to-sequence Transformers for the Hugging Face stack.

`import metaphrase` registers the models with transformers' Auto classes and plugs faster kernels and the fast decoder into them.
"""

import sys
from pathlib import Path

__version__ = "0.1.0"


def install() -> None:
    """Register the models, and plug `ops` and `decoding` into them. A second call changes nothing."""
    from metaphrase import decoding, ops

    ops.install()
    decoding.install()


# The command `metaphrase` prints its help without torch. It calls `install` once a verb needs a model.
if Path(sys.argv[0]).stem != "metaphrase":
    install()

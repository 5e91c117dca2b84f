"""`python -m metaphrase VERB ...`: the same as `metaphrase VERB ...`."""

import sys

from metaphrase.scripts.__main__ import main

if __name__ == "__main__":
    sys.exit(main())

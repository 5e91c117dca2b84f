"""`python -m metaphrase SUBCOMMAND ...`: the same as `metaphrase SUBCOMMAND ...`."""

import sys

from metaphrase.scripts.__main__ import main

if __name__ == "__main__":
    sys.exit(main())

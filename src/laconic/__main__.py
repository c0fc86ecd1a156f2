"""`python -m laconic` is the `laconic` command."""

import sys

from laconic.cli.dispatch import main

if __name__ == "__main__":
    sys.exit(main())

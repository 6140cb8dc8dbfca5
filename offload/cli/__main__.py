"""`python -m offload.cli`, where the package was not installed."""

import sys

from offload.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())

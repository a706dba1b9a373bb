"""`python -m evenpipe` is `evenpipe`."""

import sys

from evenpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

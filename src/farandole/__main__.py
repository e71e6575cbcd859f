"""`python -m farandole`: the command line."""

from __future__ import annotations

import sys

from farandole.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Run the command line for `python -m farandole`."""

from __future__ import annotations

import sys

from farandole.job.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())

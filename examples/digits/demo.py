"""The demo, as `farandole demo` runs it; its parts are in src/farandole/integrations/demo/."""

from __future__ import annotations

import sys

from farandole.integrations.demo.demo_command import demo_command

if __name__ == "__main__":
    sys.exit(demo_command(sys.argv[1:]))

"""``python -m evenstep`` and the command ``evenstep``."""

from __future__ import annotations

import sys

from evenstep.cli import main

if __name__ == "__main__":
    sys.exit(main())

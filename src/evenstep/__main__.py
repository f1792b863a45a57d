"""``python -m evenstep`` and the command ``evenstep``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

from evenstep import apart
from evenstep.cli import main


def run() -> None:
    """Run the command and end the process with its exit code.

    Python would take most of a second to take torch apart piece by piece. What others have registered to be
    done at the end is done; then the process ends at once. The first one registered is the last one called.
    """
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    is_script = sys.argv[1:2] == ["run"]
    if not is_script:  # a script's files are flushed and closed when Python takes all apart
        atexit.register(leave)
    code = main(run=apart.run)
    if is_script:
        from evenstep import script

        script.end(code)
    sys.exit(code)


if __name__ == "__main__":
    run()

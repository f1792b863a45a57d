"""What every benchmark keeps with its numbers: machine, versions, code, and how it was started."""

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def code():
    """Return this checkout's commit, with "-dirty" if tracked files have changes; None without git."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return found.stdout.strip() or None


def about(**values):
    """Return a record: when, with which arguments, on what machine, of which code, and ``values``."""
    import torch  # late: a benchmark of launching has none in the process that launches

    return {
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "argv": sys.argv[1:],
        "code": code(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        **values,
    }


def keep(name, **values):
    """Write the record of a benchmark into ``results/NAME_DATE.json``, say where, and return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{datetime.datetime.now():%Y-%m-%d_%H%M}.json"
    path.write_text(json.dumps(about(**values), indent=1, default=str) + "\n", encoding="utf-8")
    print(f"kept in {path}", flush=True)
    return path


def newest(name):
    """Return the record that ``keep`` wrote last under a name; None if there is none."""
    found = sorted(RESULTS.glob(f"{name}_*.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None

"""Scripts that tests run as processes of their own, and the options of small runs."""

import subprocess
import sys
import textwrap

CPU = {"device": "cpu", "threads": 1, "timeout_s": 30.0}


def run_script(text, *, stdin=False, path=None, command=(sys.executable,), **options):
    """Run a script and return the finished process; ``stdin``: as ``python - <<EOF``."""
    text = textwrap.dedent(text)
    if stdin:
        return subprocess.run([*command, "-"], input=text, capture_output=True, text=True, **options)
    path.write_text(text)
    return subprocess.run([*command, str(path)], capture_output=True, text=True, **options)


def start_script(path, text):
    path.write_text(textwrap.dedent(text))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(path)], start_new_session=True, **pipes)

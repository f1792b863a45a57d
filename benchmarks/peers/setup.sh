#!/usr/bin/env bash
# Make the peers' own environment, benchmarks/peers/.venv, with this checkout's evenstep in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

"${PYTHON:-python3.11}" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt --editable ../..
.venv/bin/python -m pip check

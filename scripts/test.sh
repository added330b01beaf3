#!/usr/bin/env bash
# Run the tests, after completing .venv with all they need (real vLLM and DeepSpeed included). Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
set_up test

# What else the tests want of the environment is set in tests/conftest.py, so that a plain `pytest` has it too.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # tiny models gain nothing from threads, and lanes share the cores
# Files are shared out to two processes. Not more: each may hold a vLLM engine and start ranks of its own.
exec "$PYTHON" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile "$@"

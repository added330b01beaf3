# Shared by quickstart.sh and test.sh: find a Python, make .venv, hand over to setup_env.py. Sourced, not run.
# Settings (environment): ROLLPLEX_PYTHON, the Python that makes .venv; ROLLPLEX_TORCH_INDEX, see setup_env.py.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

die() {
    echo "error: $*" >&2
    exit 1
}

# Whether $1 runs, is a version that setup.cfg allows, and can make virtual environments.
usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

# The first usable Python: 3.11 before newer ones, because it is the version that the tests are run on.
find_python() {
    local candidate
    if [ -n "${ROLLPLEX_PYTHON:-}" ]; then
        usable_python "$ROLLPLEX_PYTHON" || die "ROLLPLEX_PYTHON=$ROLLPLEX_PYTHON is not a Python 3.11-3.13 with venv"
        echo "$ROLLPLEX_PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 with its venv module: install one (Debian: python3.11-venv), or name it in ROLLPLEX_PYTHON"
}

# set_up core|test: .venv holds what that tier needs afterwards, or the script ends with a one-line error.
set_up() {
    local python
    if [ ! -e "$PYTHON" ]; then
        python="$(find_python)" || exit 1
        echo "set-up: making .venv with $("$python" --version 2>&1)"
        "$python" -m venv "$VENV" >/dev/null || die "$python could not make a virtual environment in $VENV"
    elif ! usable_python "$PYTHON"; then
        die "$VENV is broken or not Python 3.11-3.13: delete it and run this again"
    fi
    "$PYTHON" "$ROOT/scripts/setup_env.py" "$1" || exit 1
    export PATH="$VENV/bin:$PATH"  # DeepSpeed looks for ninja there
}

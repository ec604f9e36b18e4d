#!/usr/bin/env bash
# Formats and lints: clang-format on all C++, ruff and mypy on python/, clang-tidy on the folders without LibTorch (with it, a file
# takes minutes), and rules that no tool checks: which folder may include which, no absolute paths.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
install_packages clang-format clang-tidy
mapfile -t sources < <(git ls-files '*.cpp' '*.h')
clang-format --dry-run --Werror "${sources[@]}"
find_torch
install_test_packages
tools=$PYTHON
if ! "$tools" -c 'import mypy, ruff' 2> /dev/null; then  # a Python that is not ours
  python3 -m venv build/lint
  tools=build/lint/bin/python
  grep -E '^(mypy|ruff)==' tests/requirements.txt | "$tools" -m pip install --quiet --disable-pip-version-check -r /dev/stdin
fi
"$tools" -m ruff format --check --quiet python
"$tools" -m ruff check --quiet python
"$tools" -m mypy --no-error-summary --python-executable "$(command -v "$PYTHON")" --cache-dir build/mypy python/twobp

# These folders need no build: their only flags are the ones below.
mapfile -t tidy < <(git ls-files 'twobp/core/*.cpp' 'twobp/schedule/*.cpp' 'twobp/plan/*.cpp')
clang-tidy --quiet --warnings-as-errors='*' "${tidy[@]}" -- -std=c++20 -Iinclude -I. -Wall -Wextra 2> /dev/null

python3 scripts/check_layout.py
echo "format and lint: ok"

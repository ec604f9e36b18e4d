# Installs everything that a bare Debian-like machine needs to build twobp. It is quick if all is installed. ./demo and
# ./check source it from the root of the repository. It sets TORCH_PREFIX (CMake's prefix of LibTorch) and PYTHON (a
# Python with torch, or without torch if LibTorch came from CMAKE_PREFIX_PATH).
#
# LibTorch comes from the first of these that exists: CMAKE_PREFIX_PATH with TorchConfig.cmake under it, the torch in
# .venv, the torch of the Python on the PATH. Otherwise torch $TORCH_VERSION is installed into .venv.

# These are optional. The tests that need them are skipped without them. ./check all installs those of Debian that need
# root, if it is root:
#   tensorboard==2.21.0 (Python)    scripts/tensorboard.py
#   iproute2 (Debian, and root)     two hosts made of network namespaces
#   slurmd slurmctld slurm-client munge (Debian, and root)     srun, on a Slurm of one node
#   clang-16, libclang-rt-16-dev    fuzz/run (Debian; no test needs it)

TORCH_VERSION=2.13.0
PACKAGES="g++ cmake ninja-build ccache libgtest-dev libbenchmark-dev nlohmann-json3-dev libcli11-dev zlib1g-dev libopenmpi-dev openmpi-bin"

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# install_packages NAME...: installs the missing ones.
install_packages() {
  local missing=() name
  command -v dpkg-query > /dev/null || { say "no dpkg on this system: assuming that these are installed: $*"; return; }
  for name in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2> /dev/null)" = installed ] || missing+=("$name")
  done
  [ ${#missing[@]} -eq 0 ] && return
  local sudo=""
  [ "$(id -u)" -eq 0 ] || sudo=sudo
  say "installing system packages: ${missing[*]}"
  $sudo apt-get update -qq > /dev/null || say "apt-get update failed; trying the existing package lists"
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null ||
    die "could not install ${missing[*]}: install them by hand and run this again"
}

torch_prefix_of() { "$1" -c 'import torch; print(torch.utils.cmake_prefix_path)' 2> /dev/null; }

find_torch() {
  local part
  PYTHON=python3
  for part in $(tr ":;" "  " <<< "${CMAKE_PREFIX_PATH:-}"); do
    if [ -n "$(find "$part" -maxdepth 5 -name TorchConfig.cmake -print -quit 2> /dev/null)" ]; then
      TORCH_PREFIX=$CMAKE_PREFIX_PATH
      return
    fi
  done
  if [ -x .venv/bin/python ] && TORCH_PREFIX=$(torch_prefix_of .venv/bin/python); then
    PYTHON=.venv/bin/python
    return
  fi
  TORCH_PREFIX=$(torch_prefix_of python3) && return
  say "installing torch $TORCH_VERSION into .venv"
  if ! python3 -m venv .venv 2> /dev/null; then
    install_packages python3-venv
    python3 -m venv --clear .venv || die "python3 -m venv .venv failed: install Python's venv module"
  fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==$TORCH_VERSION" numpy >&2 ||
    die "could not install torch $TORCH_VERSION: install it yourself and run this again with that Python on the PATH"
  PYTHON=.venv/bin/python
  TORCH_PREFIX=$(torch_prefix_of "$PYTHON") || die "torch was installed but cannot be imported"
}

# Installs packages that some tests compare with, only into our own .venv. Without them, these tests are skipped.
install_test_packages() {
  local names
  [ "$PYTHON" = .venv/bin/python ] || return 0
  names=$(sed -n 's/^\([A-Za-z0-9_-]*\)==.*/\1/p' tests/requirements.txt)
  # shellcheck disable=SC2086
  "$PYTHON" -c 'import importlib.metadata, sys; list(map(importlib.metadata.version, sys.argv[1:]))' $names 2> /dev/null && return
  say "installing Python packages for the tests: ${names//$'\n'/ }"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt > /dev/null 2>&1 ||
    say "could not install them: the tests that compare with them are skipped"
}

# build PRESET [TARGET...]: configures the preset if necessary, and then builds.
build() {
  local preset=$1
  shift
  if [ ! -f "build/$preset/build.ninja" ] || [ "$(cat "build/$preset/torch_prefix" 2> /dev/null)" != "$TORCH_PREFIX" ]; then
    say "configuring ($preset)"
    cmake --preset "$preset" "-DCMAKE_PREFIX_PATH=${TORCH_PREFIX//:/;}" > "/tmp/twobp-configure.$$" 2>&1 ||
      { cat "/tmp/twobp-configure.$$" >&2; die "cmake failed"; }
    rm -f "/tmp/twobp-configure.$$"
    printf '%s' "$TORCH_PREFIX" > "build/$preset/torch_prefix"
  fi
  say "building ($preset)"
  # A compiler process with LibTorch's headers needs about 1.5 GiB.
  local jobs memory
  jobs=$(nproc)
  memory=$(awk '/MemAvailable/ { print int($2 / 1572864) }' /proc/meminfo)
  [ "$memory" -lt "$jobs" ] && jobs=$((memory > 0 ? memory : 1))
  cmake --build "build/$preset" --parallel "$jobs" ${1:+--target "$@"} >&2 || die "the build failed"
}

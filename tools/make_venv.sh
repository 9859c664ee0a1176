#!/usr/bin/env bash
# make_venv.sh [VENV [REQUIREMENT...]]: the virtual environment (default .venv) with this project, its tests and its
# tools. Requirements such as nvidia-cutlass-dsl==4.8.0 narrow what pip chooses.
# With an NVIDIA GPU: torch's CUDA build. Without: its CPU build. Needs Linux, Python >= 3.10, the network.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
asked=("${@:2}")
cpu_index=https://download.pytorch.org/whl/cpu

find_python() {  # the first Python >= 3.10, $PYTHON first
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "make_venv: no Python >= 3.10 found; set PYTHON=/path/to/python3" >&2
  return 1
}

driver_major() {  # the NVIDIA driver's major version; nothing where there is no GPU
  local version=""
  if command -v nvidia-smi >/dev/null; then
    version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || version=""
  fi
  if [[ ! $version =~ ^[0-9] && -r /proc/driver/nvidia/version ]]; then
    version=$(grep -oE '[0-9]+\.[0-9]+(\.[0-9]+)?' /proc/driver/nvidia/version | head -n 1) || version=""
  fi
  [[ $version =~ ^[0-9] ]] && echo "${version%%.*}" || true
}

reachable() {  # whether a page of a package index answers
  "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=15)' "$1" 2>/dev/null
}

python=$(find_python)
if [[ ! -x $venv/bin/python ]] && ! "$python" -m venv "$venv"; then
  rm -rf "$venv"
  echo "make_venv: '$python -m venv' failed; Debian and Ubuntu keep it in the package python3-venv" >&2
  exit 1
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

driver=$(driver_major)
constraints=()
extras=test,bench,docs,hf,notebooks,emulator-fast,strangers
if [[ -z $driver ]]; then
  echo "make_venv: no NVIDIA GPU found: torch's CPU build, kernels are compiled but not run"
  # A torch that was asked for is another one than the constraint's.
  torch=torch
  constraints=(-c constraints-cpu.txt)
  for requirement in ${asked[@]+"${asked[@]}"}; do
    if [[ $requirement == torch[=\<\>~]* ]]; then
      torch=$requirement
      constraints=()
    fi
  done
  # First and alone, so that no other package pulls a CUDA build. Where PyTorch's index cannot be reached,
  # the ordinary one serves (its build may bring CUDA libraries along: larger, and as good).
  index=()
  if reachable "$cpu_index/torch/"; then index=(--extra-index-url "$cpu_index"); fi
  "${pip[@]}" ${constraints[@]+"${constraints[@]}"} ${index[@]+"${index[@]}"} "$torch"
elif ((driver >= 580)); then
  echo "make_venv: NVIDIA driver $driver: CUDA 13"
  extras=test,bench,docs,hf,notebooks,emulator-fast,strangers,cu13
else
  echo "make_venv: NVIDIA driver $driver: CUDA 12"
  # The ordinary index has torch for CUDA 13, which needs driver 580; cuda-python likewise.
  "${pip[@]}" --index-url https://download.pytorch.org/whl/cu126 'torch>=2.11,<2.16'
  "${pip[@]}" 'cuda-python>=12.8,<13'
fi
"${pip[@]}" ${constraints[@]+"${constraints[@]}"} ${asked[@]+"${asked[@]}"} -e ".[$extras]"
touch "$venv/.complete"

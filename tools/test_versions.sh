#!/usr/bin/env bash
# test_versions.sh [--dsl V] [--ffi V] [--torch V] [--keep DIR] [-- pytest's arguments]: the fast tests in a fresh
# environment with other versions of nvidia-cutlass-dsl, apache-tvm-ffi and torch than pip would choose.
# --keep: the environment stays in DIR, and is used as it is where it is there already.
#
# torch 2.14 and later have no CPU build on the ordinary index and bring 4 GB of CUDA libraries: by hand only.
set -euo pipefail
cd "$(dirname "$0")/.."

# Kernels compiled, linked, cached, carried in a bundle, inspected, loaded and emulated; the operators under
# torch.compile; what the first use of every public name imports.
tests=(
  tests/cli/test_packages.py tests/cli/test_ecosystem.py tests/lowering/test_dsl_import.py
  tests/lowering/test_jit.py tests/lowering/test_link.py tests/lowering/test_inspect.py
  tests/lowering/test_bundle.py tests/blocks/attention/test_online_softmax.py tests/ops/test_first_use.py
  tests/ops/gemm/test_gemm_compiled.py tests/ops/test_tile_counter.py
)
versions=() venv=""
while (($#)); do
  case $1 in
    --dsl) versions+=("nvidia-cutlass-dsl==$2") ;;
    --ffi) versions+=("apache-tvm-ffi==$2") ;;
    --torch) versions+=("torch==$2") ;;
    --keep) venv=$2 ;;
    --)
      shift
      tests=("$@")
      break
      ;;
    *)
      echo "test_versions: unknown argument $1, must be --dsl, --ffi, --torch, --keep or --" >&2
      exit 2
      ;;
  esac
  shift 2
done
if [[ -z $venv ]]; then
  venv=$(mktemp -d)
  trap 'rm -rf "$venv"' EXIT
fi
if [[ ! -e $venv/.complete ]]; then
  tools/make_venv.sh "$venv" ${versions[@]+"${versions[@]}"}
fi
venv=$(realpath "$venv")
"$venv/bin/python" -m kernels_dsl doctor | grep -E '^(package|warning|ERROR)'
export KERNELS_DSL_CACHE_DIR=$venv/kernels
"$venv/bin/python" -m pytest -q -p no:cacheprovider -n auto --maxprocesses 16 -m "not alone" "${tests[@]}"

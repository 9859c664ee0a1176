#!/usr/bin/env bash
# fuzz_gpu.sh OUT [CASES] [SANITIZED] [SECONDS] [PYTHON]: the long run of docs/reliability.md on the GPUs of this machine:
# CASES (default 10000) of every family with seed 0, then SANITIZED (500) of each under compute-sanitizer; the four
# families run side by side. SECONDS: at most so long for either half (default 0: until done); run it again with another
# FIRST=number in the environment to go on from there. Counts, coverage and failures go to OUT/*.json.
set -uo pipefail
out=$(realpath -m "${1:?usage: fuzz_gpu.sh OUT [CASES] [SANITIZED] [SECONDS] [PYTHON]}")
cases=${2:-10000} sanitized=${3:-500} seconds=${4:-0} python=${5:-python3}
cd "$(dirname "$0")/.."
mkdir -p "$out"
families=(gemm attention fp8 bsr)
workers=$((($(nproc) + 3) / 4))
status=0

side_by_side() {  # side_by_side NAME CASES [OPTION...]
  local name=$1 count=$2 jobs=() family
  shift 2
  for family in "${families[@]}"; do
    "$python" -m tests.fuzz "$family" --cases "$count" --first "${FIRST:-0}" --seconds "$seconds" --workers "$workers" \
      --out "$out/$name$family.json" "$@" >"$out/$name$family.log" 2>&1 &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || status=1; done
  for family in "${families[@]}"; do
    echo "$name$family: $(tail -n 1 "$out/$name$family.log")"
  done
}

((cases)) && side_by_side "" "$cases" --seed 0
((sanitized)) && side_by_side sanitized_ "$sanitized" --seed 0 --sanitize
exit $status

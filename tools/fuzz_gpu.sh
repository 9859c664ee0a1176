#!/usr/bin/env bash
# fuzz_gpu.sh OUT [CASES] [SANITIZED] [SECONDS] [PYTHON]: the long run of docs/reliability.md on the GPUs of this machine:
# CASES (default 10000) of every family, then SANITIZED (500) of each under compute-sanitizer; the families run
# side by side. SECONDS: at most so long for either half (default 0: until done). In the environment: SEED (0), of which
# a new one finds what an old one cannot; FIRST, the number of the first case, to go on; FIRST_gemm and so on, for one
# family. Counts, coverage and failures go to OUT/*.json.
set -uo pipefail
out=$(realpath -m "${1:?usage: fuzz_gpu.sh OUT [CASES] [SANITIZED] [SECONDS] [PYTHON]}")
cases=${2:-10000} sanitized=${3:-500} seconds=${4:-0} python=${5:-python3}
cd "$(dirname "$0")/.."
mkdir -p "$out"
families=(gemm attention fp8 bsr serving)
declare -A share=([gemm]=2 [attention]=5 [fp8]=4 [bsr]=2 [serving]=3) # of sixteen cores, by what their cases take
status=0
cores=$(env -u OMP_NUM_THREADS nproc) # nproc gives OMP_NUM_THREADS where that is set

side_by_side() {  # side_by_side NAME CASES [OPTION...]
  local name=$1 count=$2 jobs=() family first workers
  shift 2
  for family in "${families[@]}"; do
    first=FIRST_$family
    workers=$(((share[$family] * cores + 15) / 16))
    "$python" -m tests.fuzz "$family" --cases "$count" --seed "${SEED:-0}" --first "${!first:-${FIRST:-0}}" \
      --seconds "$seconds" --workers "$workers" --out "$out/$name$family.json" "$@" >"$out/$name$family.log" 2>&1 &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || status=1; done
  for family in "${families[@]}"; do
    echo "$name$family: $(tail -n 1 "$out/$name$family.log")"
  done
}

((cases)) && side_by_side "" "$cases"
((sanitized)) && side_by_side sanitized_ "$sanitized" --sanitize
exit $status

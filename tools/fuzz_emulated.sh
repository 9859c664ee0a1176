#!/usr/bin/env bash
# fuzz_emulated.sh PYTHON [SECONDS]: random calls of every family in the emulator, for some two and a half minutes:
# half of the time with seed 0, half with a seed of its own for every commit. SECONDS (default 10): of each family and seed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1 seconds=${2:-10}
commit=$(git rev-parse --short=7 HEAD 2>/dev/null || echo 1)
status=0
for seed in 0 $((16#$commit)); do
  "$python" -m tests.fuzz all --emulate --cases 10000 --seconds "$seconds" --seed "$seed" || status=1
done
exit $status

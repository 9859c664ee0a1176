#!/usr/bin/env bash
# check_on_gpu.sh OUT [STEP...]: what a release needs of a machine with a GPU, a step after the other; default: all of
# one GPU, and those of two where two are there. A step's output goes to OUT/STEP.log, results to OUT/results; a line
# for each says how it ended. Fails where a step failed. PYTHON (python3) runs them. OLD: a revision or folder, with
# which the step `revisions` compares. LIMIT: seconds that any step may take (default 600; fuzz takes half of it).
set -uo pipefail
out=$(realpath -m "${1:?usage: check_on_gpu.sh OUT [STEP...]}")
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} limit=${LIMIT:-600} results=$out/results
mkdir -p "$results"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
((gpus)) || { echo "check_on_gpu: no NVIDIA GPU here" >&2; exit 2; }

tests() { tools/run_tests.sh "$python" -q; }
fuzz() { tools/fuzz_gpu.sh "$out/fuzz" 10000 0 $((limit / 2)) "$python"; }
sanitize() { tools/fuzz_gpu.sh "$out/fuzz" 0 500 $((limit / 2)) "$python"; }
first() { "$python" -m benchmarks.first_call --out "$results/host_first_use.json"; }
cold() { "$python" -m benchmarks.cold_calls --out "$results/host_cold_calls.json"; }
examples() {
  local status=0 name
  for name in custom_epilogue custom_mask decode_loop fp8_mlp long_context serve_tiny sparse_finetune video_blocks; do
    echo "== $name"
    "$python" -m "examples.$name" || status=1
  done
  return $status
}
revisions() { "$python" -m benchmarks.revisions "${OLD:?a revision or folder}" --out "$results/revisions.json"; }
fused() { "$python" -m benchmarks.gemm_fused --results "$results"; }
decode() { "$python" -m benchmarks.decode --out "$results"; }
backward() { "$python" -m benchmarks.attention_backward --results "$results"; }
topology() { nvidia-smi topo -m; }
context() { torchrun --nproc-per-node "$gpus" -m benchmarks.context_parallel --results "$results"; }
overlap() { torchrun --nproc-per-node "$gpus" -m benchmarks.overlapped_products --results "$results"; }
llama() { torchrun --nproc-per-node 2 -m benchmarks.llama_block --json "$results/llama_block.json"; }
train() { "$python" -m examples.train_tiny --nproc "$gpus" --plot "$out/train_tiny.svg"; }

steps=("$@")
if ((!${#steps[@]})); then
  steps=(tests fuzz sanitize first cold examples fused decode backward)
  ((gpus > 1)) && steps=(topology "${steps[@]}" context overlap llama train)
fi
export -f tests fuzz sanitize first cold examples revisions fused decode backward topology context overlap llama train
export python limit results out gpus OLD="${OLD:-}"
status=0
for step in "${steps[@]}"; do
  [[ $(type -t "$step") == function ]] || { echo "check_on_gpu: no step $step" >&2; exit 2; }
  began=$SECONDS
  timeout --kill-after 10 "$limit" bash -c "$step" >"$out/$step.log" 2>&1
  ended=$?
  ((ended)) && status=1
  echo "$step: status $ended after $((SECONDS - began)) s; $(grep -v '^ *$' "$out/$step.log" | tail -n 1 | cut -c 1-160)"
done
exit $status

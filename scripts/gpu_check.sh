#!/usr/bin/env bash
# Everything that only a GPU can show, in one run of at most eight minutes on one GPU:
#   bash scripts/gpu_check.sh [OUTPUT_FOLDER]
# flex attention against sdpa and against Speculators' flex path, training in bfloat16, states out of vLLM through the
# connector, and `vllm serve` of the trained drafter. Needs: pip install -e '.[dev,vllm]' on a CUDA machine. Steps that
# cannot run say so and do not stop the rest; the exit status counts those that failed.
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu-check}
mkdir -p "$out"
python=${PYTHON:-python3}
failed=0

step() {  # step NAME LIMIT_S COMMAND...
  local name=$1 limit=$2; shift 2
  echo "== $name"
  local began=$SECONDS
  if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "   passed in $((SECONDS - began)) s"
  else
    echo "   FAILED ($?) after $((SECONDS - began)) s; the end of $out/$name.log:"; tail -n 5 "$out/$name.log" | sed 's/^/   /'
    failed=$((failed + 1))
  fi
}

"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "no CUDA device here"; exit 2; }
step flex-tests 120 "$python" -m pytest tests/gpu -m gpu
step step-8b 150 "$python" benchmarks/gpu_step.py --json
step regenerate 60 "$python" -m peagle regenerate --model embedded:verifier --data gsm8k=embedded:train --output "$out/answers.jsonl" --max-samples 256 --max-new-tokens 200
step prepare 60 "$python" -m peagle prepare --model embedded:verifier --data "$out/answers.jsonl" --output "$out/prepared" --seq-length 1024
port=8913
if "$python" -c 'import vllm' 2>/dev/null; then
  "$python" -m peagle launch-vllm embedded:verifier --hidden-states-path "$out/shared" -- --port $port >"$out/launch.log" 2>&1 &
  server=$!
  step extract 150 "$python" -m peagle extract --preprocessed-data "$out/prepared" --output "$out/shared" --endpoint "http://127.0.0.1:$port/v1" --validate-outputs
  kill $server 2>/dev/null; wait $server 2>/dev/null
else
  echo "== vLLM is not installed: states come from Transformers, serving is not tried"
  step extract 60 "$python" -m peagle extract --preprocessed-data "$out/prepared" --output "$out/shared"
fi
step train 120 "$python" -m peagle train --verifier-name-or-path embedded:verifier --data-path "$out/prepared" --hidden-states-path "$out/shared" --save-path "$out/checkpoints" --num-layers 2 --total-seq-len 2048 --epochs 3
step check 30 "$python" -m peagle check "$out/checkpoints/checkpoint_best"
if "$python" -c 'import vllm' 2>/dev/null; then
  "$python" -m peagle serve "$out/checkpoints/checkpoint_best" -- --port $port >"$out/serve.log" 2>&1 &
  server=$!
  for _ in $(seq 90); do curl -sf "http://127.0.0.1:$port/health" >/dev/null && break; sleep 1; done
  step served 90 "$python" -m peagle evaluate --endpoint "http://127.0.0.1:$port/v1" --data gsm8k=embedded:test --max-samples 40 --output "$out/served"
  kill $server 2>/dev/null; wait $server 2>/dev/null
fi
echo "$failed failed; logs in $out"
exit "$failed"

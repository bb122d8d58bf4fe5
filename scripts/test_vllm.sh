#!/usr/bin/env bash
# Run the real-engine tests, in an environment that is built on the way (scripts/setup_vllm.sh).
#
# Where vLLM cannot be installed they are skipped with the reason; in CI (CI=true) that is a failure.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

status=0
bash scripts/setup_vllm.sh || status=$?
if [ $status -eq 0 ]; then
    python=.venv-vllm/bin/python
elif [ $status -eq 3 ] && [ -z "${CI:-}" ]; then
    python=.venv/bin/python # shows each test as skipped, with the reason
else
    exit $status
fi
# One thread per process: with more, the CPU kernels of vLLM and of the tests starve each other.
OMP_NUM_THREADS=1 exec $python -m pytest -m vllm tests/vllm/real "$@"

#!/usr/bin/env bash
# Everything that only a GPU can show, but serving: five minutes at most, on one GPU, from a bare checkout.
#   bash scripts/gpu_check.sh OUTPUT_FOLDER [options of scripts/gpu_check.py]
# Each result is printed as it comes; logs and gpu-check.json lie in the folder. Nothing is installed and no network is
# needed: the machine brings PyTorch, Transformers, Triton, a C compiler and pytest. What else it lacks is carried as
# wheels in .wheels/ (ignored by git), filled on a machine with a network, for the Python there (here 3.12):
#   python3 -m pip download --no-deps --only-binary=:all: -c constraints.txt -d .wheels --python-version 3.12 \
#     --implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
#     pydantic pydantic-core typing-inspection annotated-types datasets dill multiprocess
# Serving with vLLM is not checked here: vLLM is too large to carry. Where it is installed, scripts/test_vllm.sh does.
set -u
cd "$(dirname "$0")/.." || exit 2
[ $# -ge 1 ] || { sed -n '2,3p' scripts/gpu_check.sh; exit 2; }
python=${PYTHON:-python3}
carried=$(mktemp -d)
trap 'rm -rf "$carried"' EXIT
for wheel in .wheels/*.whl; do
  [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$carried"
done
export PYTHONPATH="$PWD/src:$PWD:$carried${PYTHONPATH:+:$PYTHONPATH}"
"$python" scripts/gpu_check.py --output "$@"

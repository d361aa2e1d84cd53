#!/usr/bin/env bash
# Prints the folder of NVRTC, NVIDIA's run-time compiler: the package from PyPI, installed once under target/nvrtc.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/target/nvrtc
lib=$root/nvidia/cu13/lib
[ -e "$lib/libnvrtc.so.13" ] ||
    python3 -m pip install --quiet --no-deps --target "$root" nvidia-cuda-nvrtc==13.0.88 >&2
echo "$lib"

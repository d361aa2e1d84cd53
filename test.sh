#!/usr/bin/env bash
# All tests. The tiny models lie in the repository; the real ones (SmolLM2 135M, Gemma 3 270M) are
# fetched once into target/models.
set -euo pipefail
cd "$(dirname "$0")"
cargo test --release --workspace "$@"

# The plugin in a workspace of its own, with this one's profile: dependencies are not compiled a second time.
mkdir -p target
sed -n '/^\[profile/,$p' Cargo.toml > target/profile.toml
cargo test --release --manifest-path examples/add-a-backend/Cargo.toml --target-dir target --config target/profile.toml

# The comparison with other engines: its tables and plot on made-up numbers.
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
    python3 bench/peers/run.py --self-test
else
    echo "bench/peers: self-test skipped: python3 (3.9 or later) is missing"
fi

# Every CUDA kernel, compiled without a GPU by NVIDIA's package of the compiler.
if nvrtc=$(tools/nvrtc.sh); then
    LD_LIBRARY_PATH="$nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" HEADWAY_TEST_NVRTC=required \
        cargo test --release -p headway-cuda --test compile
else
    echo "headway-cuda: kernels not compiled: NVRTC's package could not be fetched"
fi

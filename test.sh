#!/usr/bin/env bash
# All tests. The tiny models lie in the repository; the real ones (SmolLM2 135M, Gemma 3 270M) are
# fetched once into target/models.
set -euo pipefail
cd "$(dirname "$0")"
cargo test --release --workspace "$@"

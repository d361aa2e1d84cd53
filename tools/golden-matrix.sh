#!/usr/bin/env bash
# Every golden (tiny and real models) in every way: about 20 minutes on 2 cores. Fetches the real models
# into target/models, or takes them from HEADWAY_MODELS_DIR; goldens from HEADWAY_GOLDEN_DIR where set.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo run --release --quiet -p headway-engine --example golden_matrix

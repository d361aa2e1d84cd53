#!/usr/bin/env bash
# Holds the dependencies against deny.toml. Uses an installed cargo-deny of a version that knows the
# licence list, or builds one under target/tools.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.20.2
have=$( (cargo deny --version 2>/dev/null || true) | sed -n 's/^cargo-deny 0\.\([0-9]*\)\..*/\1/p')
if [ "${have:-0}" -ge 18 ]; then
    deny=(cargo deny)
else
    root=$PWD/target/tools
    [ -x "$root/bin/cargo-deny" ] || cargo install --quiet --locked --debug --root "$root" "cargo-deny@$version"
    deny=("$root/bin/cargo-deny" deny)
fi
"${deny[@]}" check bans licenses sources

#!/usr/bin/env bash
# curl against a running server: what a person types first.
set -euo pipefail
url=$1
json='Content-Type: application/json'
curl -sf "$url/health" && echo
curl -sf "$url/v1/models" && echo
curl -sf "$url/v1/completions" -H "$json" -d '{"prompt": "2 + 2 =", "max_tokens": 4, "temperature": 0}' && echo
curl -sfN "$url/v1/chat/completions" -H "$json" \
    -d '{"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 8, "temperature": 0, "stream": true}' | tail -n 4
curl -sf "$url/tokenize" -H "$json" -d '{"prompt": "Hello"}' && echo
status=$(curl -s -o /dev/null -w '%{http_code}' "$url/v1/completions" -H "$json" -d '{"prompt": 5}')
[ "$status" = 400 ]
curl -sf "$url/metrics" | grep -c '^headway:'
echo "ok  curl"

#!/usr/bin/env bash
# CPU time of the gateway per answer by the size of answers and of chunks, with each way to relay in turn.
#
#   benches/relay.sh [ROUNDS=3] [SECONDS=1] [CONNECTIONS=16]
#
# Needs wrk on the PATH and a release build. The gateways run on core 0; wrk and the mock workers share core 1. Compare
# within a row: absolute times depend on the machine and on its neighbours.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3} seconds=${2:-1} connections=${3:-16}
corelane=${CORELANE:-target/release/corelane} base=19300 modes=(copy splice auto)
for tool in wrk taskset curl "$corelane"; do
  command -v "$tool" >/dev/null || { echo "missing: $tool" >&2; exit 1; }
done
work=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT

taskset -c 1 "$corelane" mock-worker --port $base --count 4 --keep-alive-secs 0 >"$work/mock" 2>&1 &
pids+=($!)
declare -A pid port
for i in "${!modes[@]}"; do
  mode=${modes[$i]} port[${modes[$i]}]=$((base + 10 + i))
  "$corelane" serve --relay "$mode" --port "${port[$mode]}" --prometheus-port $((base + 20 + i)) --cores 0 --policy round_robin \
    --log-level warn --shutdown-settle-secs 0 --worker-urls http://127.0.0.1:$base http://127.0.0.1:$((base + 1)) \
    http://127.0.0.1:$((base + 2)) http://127.0.0.1:$((base + 3)) >"$work/$mode" 2>&1 &
  pid[$mode]=$!
  pids+=($!)
done
for mode in "${modes[@]}"; do
  for _ in $(seq 100); do
    curl -fs -o "$work/ready" "http://127.0.0.1:${port[$mode]}/readiness" && break
    sleep 0.1
  done
done

ticks() { awk '{ sub(/.*\) /, ""); print $12 + $13 }' "/proc/$1/stat"; }
round() { # MODE: microseconds of CPU an answer
  local before after requests
  before=$(ticks "${pid[$1]}")
  taskset -c 1 wrk -t1 -c"$connections" -d"$seconds" -s "$work/load.lua" "http://127.0.0.1:${port[$1]}/v1/completions" >"$work/wrk"
  after=$(ticks "${pid[$1]}")
  requests=$(awk '/requests in/ { print $1 }' "$work/wrk")
  if grep -E "Non-2xx|Socket errors" "$work/wrk" >&2; then echo "$1 failed requests" >&2; exit 1; fi
  awk -v t=$((after - before)) -v n="$requests" -v hz="$(getconf CLK_TCK)" 'BEGIN { print t / hz * 1e6 / n }' >>"$work/$1.row"
}
median() { sort -n "$1" | awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'; }
row() { # NAME BYTES EVENTS STREAM
  printf 'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n' >"$work/load.lua"
  printf 'wrk.body = [[{"model":"mock","prompt":"p","max_tokens":%d,"stream":%s,"mock":{"event_bytes":%d}}]]\n' \
    "$3" "$4" "$2" >>"$work/load.lua"
  rm -f "$work"/*.row
  for ((r = 0; r < rounds; r++)); do for mode in "${modes[@]}"; do round "$mode"; done; done
  awk -v name="$1" -v c="$(median "$work/copy.row")" -v s="$(median "$work/splice.row")" -v a="$(median "$work/auto.row")" \
    'BEGIN { printf "%-24s copy %7.1f  splice %7.1f  auto %7.1f us   splice/copy %.2f  auto/copy %.2f\n", name, c, s, a, s / c, a / c }'
}
kib=1024
for n in 1 16 32 64 128 256 1024; do row "one piece of $n KiB" $((n * kib)) 1 false; done
for n in 4 16 32 64 128 256; do row "16 chunks of $n KiB" $((n * kib)) 16 true; done

#!/usr/bin/env bash
# CPU time of the proxy process per request: corelane (one lane) and HAProxy (one thread) in turn, under the same load.
#
#   benches/versus.sh [SCRIPT=tuning/wrk/small.lua] [CONNECTIONS=64] [ROUNDS=5] [SECONDS=3]
#
# Needs wrk and haproxy on the PATH and a release build. The proxies run on core 0; wrk and the mock workers share
# core 1. POLICY=… and WORKERS=… change the gateway's policy and the number of workers. Quote the ratio: absolute
# times depend on the machine and on its neighbours.
set -euo pipefail
cd "$(dirname "$0")/.."
script=${1:-tuning/wrk/small.lua} connections=${2:-64} rounds=${3:-5} seconds=${4:-3}
workers=${WORKERS:-4} policy=${POLICY:-round_robin} base=19200
corelane=${CORELANE:-target/release/corelane}
for tool in wrk haproxy taskset "$corelane"; do
  command -v "$tool" >/dev/null || { echo "missing: $tool" >&2; exit 1; }
done
work=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT

taskset -c 1 "$corelane" mock-worker --port $base --count "$workers" --threads 1 --keep-alive-secs 0 >"$work/mock" 2>&1 &
pids+=($!)
{
  printf 'global\n  nbthread 1\n  maxconn 8000\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 1h\n'
  printf '  timeout server 1h\n  http-reuse always\nfrontend in\n  bind 127.0.0.1:19103\n  default_backend out\n'
  printf 'backend out\n  balance leastconn\n'
  for ((i = 0; i < workers; i++)); do printf '  server w%d 127.0.0.1:%d\n' "$i" $((base + i)); done
} >"$work/haproxy.cfg"
taskset -c 0 haproxy -db -f "$work/haproxy.cfg" >"$work/haproxy" 2>&1 &
haproxy=$!
urls=()
for ((i = 0; i < workers; i++)); do urls+=("http://127.0.0.1:$((base + i))"); done
"$corelane" serve --port 19104 --cores 0 --prometheus-port 19129 --policy "$policy" --log-level warn --shutdown-settle-secs 0 \
  --worker-urls "${urls[@]}" >"$work/corelane" 2>&1 &
gateway=$!
pids+=("$haproxy" "$gateway")
for _ in $(seq 100); do
  curl -fs -o "$work/ready" http://127.0.0.1:19104/readiness && curl -fs -o "$work/up" http://127.0.0.1:19103/v1/models && break
  sleep 0.1
done
[ -s "$work/up" ] || { echo "a proxy did not start:" >&2; cat "$work/corelane" "$work/mock" "$work/haproxy" >&2; exit 1; }

ticks() { awk '{ sub(/.*\) /, ""); print $12 + $13 }' "/proc/$1/stat"; }
round() { # NAME PID PORT
  local before after requests
  before=$(ticks "$2")
  taskset -c 1 wrk -t1 -c"$connections" -d"$seconds" -s "$script" "http://127.0.0.1:$3/v1/chat/completions" >"$work/wrk"
  after=$(ticks "$2")
  requests=$(awk '/requests in/ { print $1 }' "$work/wrk")
  if grep -E "Non-2xx|Socket errors" "$work/wrk" >&2; then echo "$1 failed requests" >&2; exit 1; fi
  awk -v name="$1" -v t=$((after - before)) -v n="$requests" -v hz="$(getconf CLK_TCK)" -v s="$seconds" \
    'BEGIN { printf "%-9s %7.0f requests/s %8.2f us of CPU each\n", name, n / s, t / hz * 1e6 / n }' | tee -a "$work/rows"
}
for ((r = 0; r < rounds; r++)); do
  round haproxy "$haproxy" 19103
  round corelane "$gateway" 19104
done
of() { # NAME: median, least and most; of an even number of rounds the median is the mean of the middle two
  awk -v name="$1" '$1 == name { print $4 }' "$work/rows" | sort -n |
    awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2, v[1], v[NR] }'
}
awk -v c="$(of corelane)" -v h="$(of haproxy)" 'BEGIN {
  split(c, C, " "); split(h, H, " ")
  printf "medians: corelane %.2f (%.2f..%.2f), haproxy %.2f (%.2f..%.2f) us; ratio %.2f\n", C[1], C[2], C[3], H[1], H[2], H[3], C[1] / H[1]
}'

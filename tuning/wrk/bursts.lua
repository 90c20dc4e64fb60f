-- As stream.lua, but all streams of a worker write at the same moment, as a decode step makes them. Only
-- benches/versus/worker.c knows "step"; streams of corelane mock-worker write each at its own time.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = string.format(
  '{"model":"mock","messages":[{"role":"user","content":"gap_ms=10 step=1 event_bytes=100 %s"}],"stream":true,"max_tokens":98,'
    .. '"mock":{"gap_ms":10,"event_bytes":100}}',
  string.rep("how are you today? ", 12))

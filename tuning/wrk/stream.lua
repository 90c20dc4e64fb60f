-- A stream of about 100 events, one every 10 ms, 100 bytes of text each. Mocks read that from "mock" (corelane
-- mock-worker) or the prompt (benches/versus/worker.c); an engine takes neither for an order and keeps its own pace.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = string.format(
  '{"model":"mock","messages":[{"role":"user","content":"gap_ms=10 event_bytes=100 %s"}],"stream":true,"max_tokens":98,'
    .. '"mock":{"gap_ms":10,"event_bytes":100}}',
  string.rep("how are you today? ", 12))

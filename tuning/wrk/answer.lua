-- Answers of 1 MiB, whole. Mocks read that from "mock" (corelane mock-worker) or the prompt (benches/versus/worker.c); an
-- engine takes neither for an order.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"model":"mock","messages":[{"role":"user","content":"answer_bytes=1048576 please"}],"max_tokens":1,'
  .. '"mock":{"event_bytes":1048576}}'

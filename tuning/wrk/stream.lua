-- A stream of about 100 events, one every 10 ms.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = string.format(
  '{"model":"mock","messages":[{"role":"user","content":"%s"}],"stream":true,"max_tokens":98,"mock":{"gap_ms":10}}',
  string.rep("how are you today? ", 12))

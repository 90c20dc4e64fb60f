-- A small chat request, answered whole.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = string.format('{"model":"mock","messages":[{"role":"user","content":"%s"}],"max_tokens":8}',
  string.rep("how are you today? ", 12))

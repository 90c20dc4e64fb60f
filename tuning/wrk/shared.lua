-- Prompts of 8 KiB below 64 common prefixes of 7 KiB, each with an own end.
math.randomseed(23)
local function words(bytes)
  local parts, have = {}, 0
  while have < bytes do
    local w = {}
    for i = 1, math.random(2, 10) do w[i] = string.char(96 + math.random(26)) end
    parts[#parts + 1] = table.concat(w)
    have = have + #parts[#parts] + 1
  end
  return table.concat(parts, " ")
end
local heads, tails, n = {}, {}, 0
for i = 1, 64 do heads[i] = words(7 * 1024) end
for i = 1, 256 do tails[i] = words(1024) end
request = function()
  n = n + 1
  local body = string.format(
    '{"model":"mock","messages":[{"role":"system","content":"%s"},{"role":"user","content":"%d %s"}],"max_tokens":4}',
    heads[n % 64 + 1], n, tails[n % 256 + 1])
  return wrk.format("POST", "/v1/chat/completions", { ["Content-Type"] = "application/json" }, body)
end

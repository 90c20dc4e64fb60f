-- Prompts of 128 KiB: 16 prefixes of 96 KiB, each followed by an own tail.
math.randomseed(11)
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
for i = 1, 16 do heads[i] = words(96 * 1024) end
for i = 1, 128 do tails[i] = words(32 * 1024) end
request = function()
  n = n + 1
  local body = string.format(
    '{"model":"mock","messages":[{"role":"system","content":"%s"},{"role":"user","content":"%d %s"}],"max_tokens":4}',
    heads[n % 16 + 1], n, tails[n % 128 + 1])
  return wrk.format("POST", "/v1/chat/completions", { ["Content-Type"] = "application/json" }, body)
end

-- Counts how many of the keys exist, to see which scripts the server runs. Some proxies refuse keys of several slots, or
-- keys that are not written as KEYS[1].
local found = 0
for _, key in ipairs(KEYS) do
    found = found + redis.call('EXISTS', key)
end
return found

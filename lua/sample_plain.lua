-- Reads numbers of one bucket at one instant, in the layouts string and entity.
--
-- KEYS[1]   the bucket: its field `_`
-- KEYS      then the targets' keys
-- ARGV[1]   "entity:" and the name of the hashes' field, for instance "entity:like"; or "string"
--
-- Returns what sample.lua does: one text, its parts separated by \0: this server's clock in microseconds since the epoch; the
-- field `_`, empty where there is none; each target's number, empty where there is none.

local now = redis.call('TIME')
local field = string.match(ARGV[1], '^entity:(.+)$')
local parts = { string.format('%.0f', now[1] * 1000000 + now[2]), redis.call('HGET', KEYS[1], '_') or '' }
for index = 2, #KEYS do
    if field then
        parts[index + 1] = redis.call('HGET', KEYS[index], field) or ''
    else
        parts[index + 1] = redis.call('GET', KEYS[index]) or ''
    end
end
return table.concat(parts, '\0')

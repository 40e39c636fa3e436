-- Says that a bucket is being loaded, or that it is loaded. Until then its missing targets are unknown, not zero.
--
-- KEYS[1]  the bucket
-- ARGV[1]  "begin" or "end"
-- ARGV[2]  the number of the run that loads it
--
-- begin: a bucket that nobody has loaded gets the field `_` = "~RUN:0". Returns { cut, id, value, id, value, ... }, this
-- server's clock in microseconds since the epoch as text and what the bucket holds then; an empty list where it is loaded.
-- end: "~RUN:N" becomes "RUN:N". Returns 1 where it did; 0 where the bucket was flushed or taken by another run since.

local state = redis.call('HGET', KEYS[1], '_') or ''
if ARGV[1] == 'begin' then
    if state ~= '' and string.sub(state, 1, 1) ~= '~' then
        return {}
    end
    redis.call('HDEL', KEYS[1], '_')
    local now = redis.call('TIME')
    local found = redis.call('HGETALL', KEYS[1])
    redis.call('HSET', KEYS[1], '_', '~' .. ARGV[2] .. ':0')
    table.insert(found, 1, string.format('%.0f', now[1] * 1000000 + now[2]))
    return found
end
local mine = '~' .. ARGV[2] .. ':'
if string.sub(state, 1, #mine) ~= mine then
    return 0
end
redis.call('HSET', KEYS[1], '_', string.sub(state, 2))
return 1

-- Says that a bucket is being loaded, or that it is loaded. Until then its missing targets are unknown, not zero.
--
-- KEYS[1]  the bucket
-- ARGV[1]  "begin" or "end"
-- ARGV[2]  the number of the run that loads it
--
-- begin: a bucket that nobody has loaded gets the field `_` = "~RUN:0". Returns 1 where it did, 0 where it is loaded.
-- end: "~RUN:N" becomes "RUN:N". Returns 1 where it did; 0 where the bucket was flushed or taken by another run since.

local state = redis.call('HGET', KEYS[1], '_') or ''
if ARGV[1] == 'begin' then
    if state ~= '' and string.sub(state, 1, 1) ~= '~' then
        return 0
    end
    redis.call('HSET', KEYS[1], '_', '~' .. ARGV[2] .. ':0')
    return 1
end
local mine = '~' .. ARGV[2] .. ':'
if string.sub(state, 1, #mine) ~= mine then
    return 0
end
redis.call('HSET', KEYS[1], '_', string.sub(state, 2))
return 1

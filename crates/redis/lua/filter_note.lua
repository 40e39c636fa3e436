-- Notes beside a target's filter users who like the target: those whose likes the daemon has written.
--
-- KEYS[1]  the filter's config
-- KEYS[2]  who likes the target and is not in its bits yet
-- ARGV     the users' ids in decimal
--
-- Returns how many were not noted before; 0 where the target has no filter and none is being built. Twice is harmless.

local config = redis.call('HMGET', KEYS[1], 'size', 'building')
if not (config[1] or config[2]) then
    return 0
end
local added = redis.call('SADD', KEYS[2], unpack(ARGV))
redis.call('HINCRBY', KEYS[1], 'inserted', added)
redis.call('HINCRBY', KEYS[1], 'waiting', added)
redis.call('PERSIST', KEYS[2])
return added

-- Adds users who like the target to a set (KEYS[2]). The filter's readers also read this set. The daemon calls the
-- script for the likes that it has written to MySQL.
--
-- KEYS[1]  the filter's config.
-- KEYS[2]  the users who like the target and are not in the filter's bits yet.
-- ARGV     the users' ids in decimal.
--
-- Returns the number of users who had not been noted before. Returns 0 if the target has no filter and no filter is
-- being built. A repeated call changes nothing.

local config = redis.call('HMGET', KEYS[1], 'size', 'building')
if not (config[1] or config[2]) then
    return 0
end
local added = redis.call('SADD', KEYS[2], unpack(ARGV))
redis.call('HINCRBY', KEYS[1], 'inserted', added)
redis.call('HINCRBY', KEYS[1], 'waiting', added)
redis.call('PERSIST', KEYS[2])
return added

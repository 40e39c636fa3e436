-- Moves the users in the set KEYS[3] into the filter: sets their bits in the filter, and removes the users from the
-- set.
--
-- KEYS[1]  the filter.
-- KEYS[2]  its config.
-- KEYS[3]  the users who like the target and are not in the filter's bits yet.
-- ARGV[1]  the filter size that the bits were computed for.
-- ARGV[2]  the filter's hashIterations.
-- ARGV     then for each user: the id in decimal, and ARGV[2] bit positions.
--
-- Returns the number of users that the script removed from the set. Returns -1 if the filter was replaced, or if
-- Redis has lost a part of the filter. Also returns -1 if a new filter is being built, because the new filter could
-- lack the users.

local config = redis.call('HMGET', KEYS[2], 'size', 'hashIterations', 'building', 'waiting')
if
    config[1] ~= ARGV[1]
    or config[2] ~= ARGV[2]
    or config[3]
    or redis.call('STRLEN', KEYS[1]) ~= math.ceil(ARGV[1] / 8)
    or redis.call('SCARD', KEYS[3]) < tonumber(config[4] or 0)
then
    return -1
end
local iterations, taken = tonumber(ARGV[2]), 0
for place = 3, #ARGV, iterations + 1 do
    for index = place + 1, place + iterations do
        redis.call('SETBIT', KEYS[1], ARGV[index], 1)
    end
    taken = taken + redis.call('SREM', KEYS[3], ARGV[place])
end
redis.call('HSET', KEYS[2], 'waiting', redis.call('SCARD', KEYS[3]))
-- If a like was counted while a Cluster was moving the slot, the set of noted users has an expiry.
redis.call('PERSIST', KEYS[3])
return taken

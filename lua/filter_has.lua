-- Asks a target's Bloom filter whether a user likes the target. The script changes nothing.
--
-- KEYS[1]  the target's filter, for instance tally:filter:{video:3a2f}:42.
-- KEYS[2]  its config.
-- KEYS[3]  the users who like the target and are not in the filter's bits yet.
-- ARGV[1]  the user's id in decimal.
-- ARGV[2]  the field `epoch` of tally:filter:epoch, read within the last second. A filter of another epoch
--          is not trusted.
-- ARGV[3]  a filter size, for which the caller computed the user's bits. Empty if the caller passes no bits.
-- ARGV     from ARGV[4] on: the user's bits in a filter of the size ARGV[3].
--
-- Returns 0 if the user does not like the target. This answer does not include clicks of the last minutes, so read the
-- recent clicks before you use this answer. Returns 1 if the answer is unknown: ask MySQL. If the bits are for another
-- shape, returns the filter's shape { size, hashIterations }: call again with bits for this shape.

local config = redis.call('HMGET', KEYS[2], 'size', 'hashIterations', 'waiting', 'epoch')
local size, iterations = config[1], config[2]
-- A filter of another epoch is not trusted, because a failover may have lost likes. The script also does not trust a
-- filter if Redis evicted a part of the filter. Then the string of the filter is too short, or the set KEYS[3] has
-- fewer members than `waiting` says.
if
    not size
    or config[4] ~= ARGV[2]
    or redis.call('STRLEN', KEYS[1]) ~= math.ceil(size / 8)
    or redis.call('SCARD', KEYS[3]) < tonumber(config[3] or 0)
then
    return 1
end
if size ~= ARGV[3] or #ARGV - 3 ~= tonumber(iterations) then
    return { tonumber(size), tonumber(iterations) }
end
if redis.call('SISMEMBER', KEYS[3], ARGV[1]) == 1 then
    return 1
end
for index = 4, #ARGV do
    if redis.call('GETBIT', KEYS[1], ARGV[index]) == 0 then
        return 0
    end
end
return 1

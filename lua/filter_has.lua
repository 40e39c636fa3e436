-- Says whether a user may be among those who like a target, by its Bloom filter. Changes nothing.
--
-- KEYS[1]  the target's filter, for instance tally:filter:{video:3a2f}:42
-- KEYS[2]  its config
-- KEYS[3]  who likes the target and is not in its bits yet
-- ARGV[1]  the user's id in decimal
-- ARGV[2]  the field `epoch` of tally:filter:epoch, read within the last second: a filter of another epoch is not believed
-- ARGV[3]  the size of the filter that the following bits are for; empty without bits
-- ARGV     then the user's bits in it
--
-- Returns 0: the user does not like the target, for certain, unless a click of the last minutes says otherwise, which must have been looked
-- at before. 1: nobody knows, ask MySQL. A list { size, hashIterations }: the filter has this shape, and other bits are needed.

local config = redis.call('HMGET', KEYS[2], 'size', 'hashIterations', 'waiting', 'epoch')
local size, iterations = config[1], config[2]
-- One of another epoch says nothing: a failover may have lost likes. Nor does one that lost a part (an eviction): its string is shorter,
-- or more were added than are there.
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

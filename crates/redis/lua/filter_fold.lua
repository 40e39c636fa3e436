-- Sets the bits of users who were only noted beside a filter, and takes them out of there.
--
-- KEYS[1]  the filter
-- KEYS[2]  its config
-- KEYS[3]  who likes the target and is not in its bits yet
-- ARGV[1]  the size of the filter that the bits are for
-- ARGV[2]  its hashIterations
-- ARGV     then for each user: the id in decimal, and as many bits
--
-- Returns how many were taken out; -1 where the filter is another one now, or one is being built, which would lack them.

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
-- It may have come with an end, from a like that was counted while a slot of a Cluster moved.
redis.call('PERSIST', KEYS[3])
return taken

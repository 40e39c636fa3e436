-- Adds members of a snapshot or an archive to a zset that nobody reads yet.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the zset
-- ARGV[1]  the claim of the run that does it
-- ARGV     then scores and members in turn; none to begin anew
--
-- It goes away by itself after a day, unless it is put in its place.
--
-- Returns how many members the zset has; -1 where the claim is not this run's (any more).

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if #ARGV == 1 then
    redis.call('UNLINK', KEYS[2])
    return 0
end
redis.call('ZADD', KEYS[2], unpack(ARGV, 2))
redis.call('EXPIRE', KEYS[2], 86400)
return redis.call('ZCARD', KEYS[2])

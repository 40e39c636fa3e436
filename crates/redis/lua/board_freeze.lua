-- Puts a zset in another one's place: a closed period's live one, which its writers lose, or one that was filled.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the zset
-- KEYS[3]  its new place
-- KEYS[4]  where that is the frozen zset: the notes of which periods were frozen
-- KEYS[5]  where the zset was raised: how many pages this server was given
-- ARGV[1]  the claim of the run that does it
-- ARGV[2]  the period
-- ARGV[3]  its note: the run that put it back, 0 where it is the board itself
-- ARGV[4]  how many pages it was given in all
--
-- Returns 1 where it did; 0 where the place is taken, which is never renamed over; -1 where the claim is not this run's (any more); -2 where
-- there is no zset; -3 where pages are missing: another server has taken over. Note and zset change together, or a failover could part them.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 1 then
    return 0
end
if redis.call('EXISTS', KEYS[2]) == 0 then
    return -2
end
if KEYS[5] and redis.call('GET', KEYS[5]) ~= ARGV[4] then
    return -3
end
redis.call('RENAME', KEYS[2], KEYS[3])
if KEYS[4] then
    redis.call('PERSIST', KEYS[3])
    redis.call('HSET', KEYS[4], ARGV[2], ARGV[3])
    -- Into this zset nothing was moved yet (board_merge.lua).
    redis.call('HDEL', KEYS[4], ARGV[2] .. ':late')
end
return 1

-- Takes a closed period's zset away from those who write to it.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the live zset
-- KEYS[3]  the frozen zset
-- KEYS[4]  where there is a snapshot of the board: its mark; where it was raised: how many pages it was given
-- ARGV[1]  the number of the run that does it
-- ARGV     then what KEYS[4] may hold
--
-- Returns 1 where it did; 0 where a frozen zset is there already, which is never renamed over; -1 where the claim is not
-- this run's (any more); -2 where there is no live zset; -3 where KEYS[4] holds something else or is gone: Redis has lost the board, and the
-- live zset is only what came since; or another server has taken over.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 1 then
    return 0
end
if redis.call('EXISTS', KEYS[2]) == 0 then
    return -2
end
if KEYS[4] then
    local mark = redis.call('GET', KEYS[4])
    local known = false
    for index = 2, #ARGV do
        known = known or mark == ARGV[index]
    end
    if not known then
        return -3
    end
end
redis.call('RENAME', KEYS[2], KEYS[3])
return 1

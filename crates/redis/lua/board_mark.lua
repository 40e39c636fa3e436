-- Marks a board with the number of a snapshot, or takes the mark away. With the mark gone, so is the board.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the mark
-- KEYS[3]  the live zset
-- ARGV[1]  the claim of the run that does it
-- ARGV[2]  the mark that must be there; empty where there must be none
-- ARGV[3]  the mark that it gets; empty for none
--
-- Returns 1 where it did; -1 where the claim is not this run's (any more); -2 where there is neither a mark nor a board; -3 where the mark is
-- another one or gone.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then
    return -3
end
if ARGV[3] == '' then
    redis.call('UNLINK', KEYS[2])
    return 1
end
if ARGV[2] == '' and redis.call('EXISTS', KEYS[3]) == 0 then
    return -2
end
redis.call('SET', KEYS[2], ARGV[3])
return 1

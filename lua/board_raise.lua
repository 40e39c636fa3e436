-- Raises members of a live board to what its snapshot has of them, where that is higher: for a board that Redis has an older state of.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the live zset
-- KEYS[3]  the frozen zset
-- ARGV[1]  the number of the run that does it
-- ARGV     then scores and members in turn
--
-- Returns how many members were raised or added; -1 where the claim is not this run's (any more); -2 where the board is frozen. However
-- often it runs, nothing is added twice.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 1 then
    return -2
end
return redis.call('ZADD', KEYS[2], 'GT', 'CH', unpack(ARGV, 2))

-- Raises members of a live board to what MySQL has of them, in a snapshot or an archive, where that is higher: for a board that Redis has an older
-- state of.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the live zset
-- KEYS[3]  the frozen zset
-- KEYS[4]  of a board that is frozen after that: how many pages this server has been given
-- ARGV[1]  the claim of the run that does it
-- ARGV[2]  how many pages came before this one
-- ARGV     then scores and members in turn
--
-- Returns how many members were raised or added; -1 where the claim is not this run's (any more), or a page before this one is missing: another server
-- has taken over; -2 where the board is frozen. However often it runs, nothing is added twice.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 1 then
    return -2
end
if KEYS[4] then
    if ARGV[2] ~= '0' and redis.call('GET', KEYS[4]) ~= ARGV[2] then
        return -1
    end
    redis.call('SET', KEYS[4], ARGV[2] + 1, 'EX', 86400)
end
return #ARGV > 2 and redis.call('ZADD', KEYS[2], 'GT', 'CH', unpack(ARGV, 3)) or 0

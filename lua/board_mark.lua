-- Marks a board with the number of the snapshot that begins. With the mark gone, so is the board.
--
-- KEYS[1]  the mark
-- KEYS[2]  the live zset
-- ARGV[1]  the mark that must be there; empty where there must be none
-- ARGV[2]  the number of the run that begins the snapshot
--
-- Returns 1 where it did; -2 where there is neither a mark nor a board; -3 where the mark is another one or gone.

if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then
    return -3
end
if ARGV[1] == '' and redis.call('EXISTS', KEYS[2]) == 0 then
    return -2
end
redis.call('SET', KEYS[1], ARGV[2])
return 1

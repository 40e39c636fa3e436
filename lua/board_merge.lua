-- Moves one page of what was written to a closed period after it was frozen into the frozen zset, by adding.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the live zset, made anew by what came late
-- KEYS[3]  the frozen zset
-- ARGV[1]  the number of the run that does it
-- ARGV[2]  how many members at most
--
-- Returns how many were moved; -1 where the claim is not this run's (any more); -2 where there is no frozen zset: then
-- nothing moves, because what came late alone is no board.
--
-- Each member is added and removed in one piece, so however often and late this runs, each score is added once.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 0 then
    return -2
end
local page = redis.call('ZRANGE', KEYS[2], 0, ARGV[2] - 1, 'WITHSCORES')
for index = 1, #page, 2 do
    redis.call('ZINCRBY', KEYS[3], page[index + 1], page[index])
    redis.call('ZREM', KEYS[2], page[index])
end
return #page / 2

-- Notes which periods of a board MySQL has as frozen: all, where Redis is empty, was flushed, or has kept no notes; else those that have no live
-- zset, so that what is written from now on is late.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the notes
-- KEYS     then, where the notes are there already, the live zset of each period
-- ARGV[1]  the number of the run that does it
-- ARGV     then, of each period, its name and when it was put back from its archive, 0 where it never was
--
-- Returns how many were noted; -1 where the claim is not this run's (any more). In one piece, or a period that is missing would be taken for one that
-- Redis has from before it was frozen. The field "-" is no period: with it the notes are there, though nothing was frozen.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if not KEYS[3] then
    redis.call('UNLINK', KEYS[2])
end
redis.call('HSET', KEYS[2], '-', ARGV[1])
local noted = 0
for index = 2, #ARGV, 2 do
    local live = KEYS[2 + index / 2]
    if not live or redis.call('EXISTS', live) == 0 then
        redis.call('HSET', KEYS[2], ARGV[index], ARGV[index + 1])
        noted = noted + 1
    end
end
return noted

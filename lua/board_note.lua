-- Begins the notes of which periods of a board were frozen, with those that MySQL says were: Redis is empty, was flushed, or has kept no notes yet.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the notes
-- ARGV[1]  the number of the run that does it
-- ARGV     then the periods
--
-- Returns how many; -1 where the claim is not this run's (any more). In one piece, or a period that is missing would be taken for one that Redis has from
-- before it was frozen. The field "-" is no period: with it the notes are there, though nothing was frozen.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
redis.call('HSET', KEYS[2], '-', ARGV[1])
for index = 2, #ARGV do
    redis.call('HSET', KEYS[2], ARGV[index], ARGV[1])
end
return #ARGV - 1

-- Says how long a frozen zset stays, and notes that there is one.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the frozen zset
-- KEYS[3]  the notes of which periods were frozen
-- ARGV[1]  the number of the run that does it
-- ARGV[2]  seconds from now; 0 for as long as it takes
-- ARGV[3]  the period
-- ARGV[4]  when it was put back from its archive, 0 where it never was
--
-- Returns 1 where it did; -1 where the claim is not this run's (any more), or the notes are gone, which the next run begins anew; -2 where there is no
-- frozen zset.

if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('EXISTS', KEYS[3]) == 0 then
    return -1
end
if redis.call('EXISTS', KEYS[2]) == 0 then
    return -2
end
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
if ARGV[2] == '0' then
    redis.call('PERSIST', KEYS[2])
else
    redis.call('EXPIRE', KEYS[2], ARGV[2])
end
return 1

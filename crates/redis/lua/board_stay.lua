-- Sets how long Redis keeps a frozen zset.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the frozen zset.
-- ARGV[1]  the claim of this run.
-- ARGV[2]  seconds from now; 0 for no limit.
--
-- Returns 1 on success, -1 if another run has the claim, -2 if there is no frozen zset.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[2]) == 0 then
    return -2
end
if ARGV[2] == '0' then
    redis.call('PERSIST', KEYS[2])
else
    redis.call('EXPIRE', KEYS[2], ARGV[2])
end
return 1

-- Adds members of a snapshot or an archive to a zset that no client reads yet.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the zset.
-- ARGV[1]  the claim of this run.
-- ARGV     then for each member: its score, and the member. Without members the script deletes the zset.
--
-- If no other script moves the zset to its final key, the zset expires after a day.
--
-- Returns how many members the zset has. Returns -1 if another run has the claim.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if #ARGV == 1 then
    redis.call('UNLINK', KEYS[2])
    return 0
end
redis.call('ZADD', KEYS[2], unpack(ARGV, 2))
redis.call('EXPIRE', KEYS[2], 86400)
return redis.call('ZCARD', KEYS[2])

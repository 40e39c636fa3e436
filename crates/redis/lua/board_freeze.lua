-- Moves a zset to a new key. The zset is the live zset of a closed period, or a zset that a run has filled. After the
-- move, clients no longer write to this zset.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the zset.
-- KEYS[3]  its new key.
-- KEYS[4]  if the new key is the frozen zset: the notes about frozen periods.
-- KEYS[5]  this key exists only if board_raise.lua has raised the scores in the zset. The key contains the number of
--          pages that board_raise.lua has added to the zset on this server.
-- ARGV[1]  the claim of this run.
-- ARGV[2]  the period. Without KEYS[4]: the number of members that the run has filled into the zset.
-- ARGV[3]  the value to store for the period: the number of the run that restored the board, or 0 if no run has
--          restored the board.
-- ARGV[4]  only if board_raise.lua has raised the scores in the zset: the total number of pages.
--
-- Returns  1  the zset was moved.
--          0  the new key exists already, and is never overwritten.
--         -1  another run has the claim.
--         -2  there is no zset.
--         -3  pages or members are missing, because another Redis server has taken over.
--
-- The script changes both the note and the zset. With two separate commands, a failover after the first command could
-- lose the second change.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 1 then
    return 0
end
if redis.call('EXISTS', KEYS[2]) == 0 then
    return -2
end
if (KEYS[5] and redis.call('GET', KEYS[5]) ~= ARGV[4])
    or (not KEYS[4] and redis.call('ZCARD', KEYS[2]) ~= tonumber(ARGV[2])) then
    return -3
end
redis.call('RENAME', KEYS[2], KEYS[3])
if KEYS[4] then
    redis.call('PERSIST', KEYS[3])
    redis.call('HSET', KEYS[4], ARGV[2], ARGV[3])
    -- No late members have been moved into this zset yet (board_merge.lua).
    redis.call('HDEL', KEYS[4], ARGV[2] .. ':late')
end
return 1

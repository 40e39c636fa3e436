-- Compares the members of a board with scores from MySQL (from a snapshot or an archive). If a member's score in MySQL
-- is higher than in Redis, the script writes MySQL's score to Redis. The daemon uses this script if Redis has gone back
-- to an older state of the board.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the zset.
-- KEYS[3]  the count of pages that this server received.
-- KEYS[4]  if KEYS[2] is the live zset: the frozen zset. Otherwise the hash with the board's freeze notes.
-- ARGV[1]  the claim of this run.
-- ARGV[2]  the number of pages before this page.
-- ARGV[3]  empty if KEYS[2] is the live zset. Otherwise the field of KEYS[4] with the count of late members that were
--          moved into the frozen zset.
-- ARGV[4]  the expected count. If another Redis server has taken over, it can lack the last of these moves.
-- ARGV     then scores and members in turn. The first page of a zset has none. The last page of a frozen zset has none.
--
-- Returns  n  the number of members that were raised or added.
--         -1  another run has the claim, or another Redis server has taken over and lacks an earlier call of this run.
--         -2  the board is frozen, or there is no frozen zset.
--
-- The script replaces lower scores, and never adds to a score. So a repeated call is harmless.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if ARGV[3] == '' then
    if redis.call('EXISTS', KEYS[4]) == 1 then
        return -2
    end
elseif redis.call('EXISTS', KEYS[2]) == 0 then
    return -2
elseif (redis.call('HGET', KEYS[4], ARGV[3]) or '0') ~= ARGV[4] then
    return -1
end
if ARGV[2] ~= '0' and redis.call('GET', KEYS[3]) ~= ARGV[2] then
    return -1
end
redis.call('SET', KEYS[3], ARGV[2] + 1, 'EX', 86400)
if ARGV[3] ~= '' and ARGV[2] ~= '0' and #ARGV == 4 then
    -- The raise counts as one late member. If a server that lacks this raise takes over, its count is lower than MySQL's.
    redis.call('HSET', KEYS[4], ARGV[3], string.format('%.0f', ARGV[4] + 1))
end
return #ARGV > 4 and redis.call('ZADD', KEYS[2], 'GT', 'CH', unpack(ARGV, 5)) or 0

-- Compares the members of a board with scores from MySQL (from a snapshot or an archive). If a member's score in MySQL
-- is higher than in Redis, the script writes MySQL's score to Redis. The daemon uses this script if Redis has gone back
-- to an older state of the board.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the zset.
-- KEYS[3]  the count of pages that this server received.
-- KEYS[4]  only if KEYS[2] is the live zset: the frozen zset.
-- ARGV[1]  the claim of this run.
-- ARGV[2]  the number of pages before this page; empty if pages are not counted.
-- ARGV     then scores and members in turn.
--
-- Returns  n  the number of members that were raised or added.
--         -1  another run has the claim, or an earlier page is missing because another Redis server has taken over.
--         -2  the board is frozen.
--
-- The script replaces lower scores, and never adds to a score. So a repeated call is harmless.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if KEYS[4] and redis.call('EXISTS', KEYS[4]) == 1 then
    return -2
end
if ARGV[2] ~= '' then
    if ARGV[2] ~= '0' and redis.call('GET', KEYS[3]) ~= ARGV[2] then
        return -1
    end
    redis.call('SET', KEYS[3], ARGV[2] + 1, 'EX', 86400)
end
return #ARGV > 2 and redis.call('ZADD', KEYS[2], 'GT', 'CH', unpack(ARGV, 3)) or 0

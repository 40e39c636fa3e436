-- Removes a member from a board's zset, or renames it and keeps its score.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the zset.
-- ARGV[1]  the claim of this run.
-- ARGV[2]  the member.
-- ARGV[3]  the member's new name; empty to remove the member.
--
-- Returns 1 on success, -1 if another run has the claim, -2 if the zset has no such member.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
local score = redis.call('ZSCORE', KEYS[2], ARGV[2])
if not score then
    return -2
end
if ARGV[3] ~= '' then
    redis.call('ZADD', KEYS[2], score, ARGV[3])
end
redis.call('ZREM', KEYS[2], ARGV[2])
return 1

-- Takes a member out of a board's zset, or gives it another name that keeps its score.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the zset
-- ARGV[1]  the claim of the run that does it
-- ARGV[2]  the member
-- ARGV[3]  its new name; empty for none
--
-- Returns 1 where it did, -1 where the claim is not this run's (any more), -2 where the zset has no such member.

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

-- Counts a user's clicks in a window of time, and returns whether one more click is allowed. This script is separate
-- from like.lua, because on a Redis Cluster the keys of a user and of a target are on different nodes. Call this script
-- first, then like.lua.
--
-- KEYS[1]  the user's window, for instance tally:limit:{7}.
-- ARGV[1]  how many clicks a window allows.
-- ARGV[2]  the length of a window in milliseconds. A window begins with its first click.
-- ARGV[3]  a text that only a retry of the same click repeats, for instance its event. The window counts a
--          retry once, because a retry comes after an outage and not after another click.
--
-- If this click is allowed, returns { 1, left }: the number of clicks that are left. If this click is not allowed,
-- returns { 0, ms }: the milliseconds until the window ends.

if not redis.call('ZSCORE', KEYS[1], ARGV[3]) then
    if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then
        return { 0, redis.call('PTTL', KEYS[1]) }
    end
    redis.call('ZADD', KEYS[1], 0, ARGV[3])
    if redis.call('ZCARD', KEYS[1]) == 1 then
        redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
end
return { 1, ARGV[1] - redis.call('ZCARD', KEYS[1]) }

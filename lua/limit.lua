-- Counts a user's clicks in a window of time, and returns whether one more click is allowed. This script is separate
-- from like.lua, because on a Redis Cluster the keys of a user and of a target are on different nodes. Call this script
-- first, then like.lua.
--
-- KEYS[1]  the user's window, for instance tally:limit:{7}.
-- ARGV[1]  how many clicks a window allows.
-- ARGV[2]  the length of a window in milliseconds. A window begins with its first click.
--
-- If this click is allowed, returns { 1, left }: the number of clicks that are left. If this click is not allowed,
-- returns { 0, ms }: the milliseconds until the window ends.

local used = redis.call('INCR', KEYS[1])
if used == 1 then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if used <= tonumber(ARGV[1]) then
    return { 1, ARGV[1] - used }
end
return { 0, redis.call('PTTL', KEYS[1]) }

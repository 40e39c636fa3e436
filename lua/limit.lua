-- Counts what a user does in a window of time, and says whether that is still allowed. A script of its own, called before like.lua:
-- on a Redis Cluster a user and a target are on different nodes.
--
-- KEYS[1]  the user's window, for instance tally:limit:{7}
-- ARGV[1]  how many clicks a window allows
-- ARGV[2]  how long a window lasts, in milliseconds, from its first click on
--
-- Returns { 1, left } where this one is allowed, with how many are left; { 0, ms } where it is not, with the milliseconds until the
-- window ends.

local used = redis.call('INCR', KEYS[1])
if used == 1 then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if used <= tonumber(ARGV[1]) then
    return { 1, ARGV[1] - used }
end
return { 0, redis.call('PTTL', KEYS[1]) }

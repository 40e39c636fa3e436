-- Adds a user who likes a target to the set of users who are not in the target's filter yet. Call this script for each
-- like that lua/like.lua has counted without the filter's keys.
--
-- KEYS[1]  the users who like the target and are not in the filter's bits yet.
-- KEYS[2]  the filter's config. Leave this key out while a Cluster moves the slot, because scripts with several keys
--          then fail.
-- ARGV[1]  the user's id in decimal.
-- ARGV[2]  the number of seconds after which the set KEYS[1] expires. The script uses this argument only if the target
--          has no filter and the set was empty before this call.
--
-- Returns 1.

local was_there = redis.call('SCARD', KEYS[1]) > 0
local added = redis.call('SADD', KEYS[1], ARGV[1])
local config = KEYS[2] and redis.call('HMGET', KEYS[2], 'size', 'building')
if config and (config[1] or config[2]) then
    redis.call('HINCRBY', KEYS[2], 'inserted', 1)
    redis.call('HINCRBY', KEYS[2], 'waiting', added)
    redis.call('PERSIST', KEYS[1])
elseif not was_there then
    redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return 1

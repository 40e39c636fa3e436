-- Notes beside a target's filter that a user likes the target. Call this script for each like that lua/like.lua has
-- counted without the filter's keys.
--
-- KEYS[1]  the users who like the target and are not in the filter's bits yet.
-- KEYS[2]  the filter's config. Leave this key out while a Cluster moves the slot, because scripts with several keys
--          then fail.
-- ARGV[1]  the user's id in decimal.
-- ARGV[2]  for how many seconds the note stays if the target has no filter and no other user is noted.
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

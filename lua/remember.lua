-- Remembers a click that was counted by a call of lua/like.lua with only one key. If Redis already remembers a newer
-- click, the script does nothing.
--
-- KEYS[1]  the recent clicks in the bucket. This is the script's only key, so the script can also run while a Cluster
--          moves the slot.
-- ARGV[1]  the target's id, ":" and the user's id.
-- ARGV[2]  the click's `at`, and "+" for a like or "-".
-- ARGV[3]  the minimum number of seconds for which a click is remembered.
--
-- Returns 1. Returns 0 if a newer click is remembered.

local last = redis.call('HGET', KEYS[1], ARGV[1])
if last and tonumber(string.sub(last, 1, -2)) >= tonumber(string.sub(ARGV[2], 1, -2)) then
    return 0
end
if not redis.call('HGET', KEYS[1], '_') then
    redis.call('HSET', KEYS[1], '_', redis.call('TIME')[1])
    redis.call('EXPIRE', KEYS[1], 3 * ARGV[3])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1

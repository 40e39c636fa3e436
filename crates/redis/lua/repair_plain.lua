-- Repairs numbers of one bucket in the layouts string and entity: adds the drift (the difference from MySQL that a run
-- has measured) to each number. Each drift is added at most once.
--
-- KEYS[1]  the bucket: its field `_`.
-- KEYS     after KEYS[1]: one key for each number.
-- ARGV[1]  the field `_` as it was in the sample.
-- ARGV[2]  the new value of `_`: the same loader, and the number of this repair.
-- ARGV[3]  the latest instant at which the repair can run, as in repair.lua.
-- ARGV     then two arguments for each number. The first is "entity:" with the name of the hash's field (for instance
--          "entity:like"), or "string". The second is the amount, in the format of repair.lua ("5", "5@12" or "-5!").
--
-- Returns one result for each number:
--          1  the amount was added.
--          0  skipped, because the number would have gone below zero.
--          2  skipped, because the number may have been set.
-- Returns an empty list if the bucket was repaired, flushed or loaded again since the sample, or if the latest instant
-- has passed.

local now = redis.call('TIME')
if (redis.call('HGET', KEYS[1], '_') or '') ~= ARGV[1] or now[1] * 1000000 + now[2] > tonumber(ARGV[3]) then
    return {}
end
now = now[1] * 1000000 + now[2]
-- If the last set event has a time in the future, lua/count.lua stored this time before the clock was put back. If this
-- time is at most five minutes ahead, it blocks repairs, because lua/count.lua gives every further set event a later
-- time.
local set_at = tonumber(redis.call('HGET', KEYS[1], '_s') or 0)
if set_at > now + 300000000 then
    set_at = 0
end
-- This field is written first, because a repeated call must not add the amounts again if a later command fails.
redis.call('HSET', KEYS[1], '_', ARGV[2])
local done = {}
for index = 2, #KEYS do
    local field = string.match(ARGV[2 * index], '^entity:(.+)$')
    local text, only, below_zero = string.match(ARGV[2 * index + 1], '^(%-?%d+)@?(%-?%d*)(!?)$')
    local added, before = tonumber(text), nil
    if field then
        before = redis.call('HGET', KEYS[index], field)
    else
        before = redis.call('GET', KEYS[index])
    end
    if only ~= '' and set_at >= tonumber(only) then
        done[index - 1] = 2
    elseif added < 0 and below_zero == '' and tonumber(before or 0) + added < 0 then
        done[index - 1] = 0
    elseif field then
        redis.call('HINCRBY', KEYS[index], field, added)
        done[index - 1] = 1
    else
        redis.call('INCRBY', KEYS[index], added)
        done[index - 1] = 1
    end
end
return done

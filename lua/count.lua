-- Changes a number that API servers count in Redis (writer = "api"), and returns the instant of the change. Likes use
-- lua/like.lua instead.
--
-- KEYS[1]  the key of the number: the target's bucket, for instance tally:c:{video:3a2f}; in the layouts entity and
--          string a separate key.
-- KEYS[2]  in the layouts entity and string the target's bucket: its field `_` says whether Redis has lost something.
-- ARGV[1]  the target's id in decimal: the field of a bucket.
-- ARGV[2]  the place of the metric in the field's value: its code in [metrics], from 1. In the layout entity, the
--          text "entity:" and the name of the hash's field, for instance "entity:view". In the layout string, the
--          text "string".
-- ARGV[3]  "add" or "set".
-- ARGV[4]  the amount to add, or the number to set: between -2^53 and 2^53, exclusive.
-- ARGV[5]  1 if the number may be less than zero, else 0.
-- ARGV[6]  is sent only for numbers that can be set. If this call repeats a change that the caller took back, this argument is
--          the `at` of the first call. For all other changes, it is 0. A repeated change does nothing if a number of
--          the bucket was set after this `at`.
--
-- Returns { result, at, count, added }.
--   result  1: publish the event.
--           0: the change would make the number negative, or more negative. Nothing was changed, and the event must
--           not be published.
--   at      this server's clock in microseconds since the epoch as text. The event must contain it as `at`.
--   count   the number after the change. nil if it is unknown, because Redis has lost the bucket (it has no field `_`)
--           or is still loading it. Then ARGV[5] is ignored, because it is unknown how far above zero the number is.
--   added   the number after the change minus the number before. To take the change back, subtract it.
--
-- The script stores the `at` of a set in the bucket's field `_s`. If a number was set after a reconcile measured it,
-- the reconcile does not repair this number.
--
-- Each call counts, so a repeated call counts twice. If the result would be 2^53 or more (no longer exact), or if the
-- key contains no number, the script fails and changes nothing.

-- The largest exact number. Lua may round a larger result, but the rounded result is larger than this number, too.
local exact = 9007199254740991
local number = tonumber(ARGV[4])
if not number or number % 1 ~= 0 or math.abs(number) > exact then
    return redis.error_reply('ERR count.lua: ARGV[4] is no integer below 2^53')
end
local id, place = ARGV[1], tonumber(ARGV[2])
local field = string.match(ARGV[2], '^entity:(.+)$')
local values, before, loaded, set_at = {}, nil, nil, nil

local function read(text)
    local value = string.match(text, '^%-?%d+$') and tonumber(text)
    return value and math.abs(value) <= exact and value or false
end

if place then
    local found, broken = redis.call('HMGET', KEYS[1], id, '_', '_s'), false
    loaded, set_at = found[2], found[3]
    for text in string.gmatch(found[1] and found[1] .. ',' or '', '([^,]*),') do
        values[#values + 1] = read(text)
        broken = broken or not values[#values]
    end
    if broken then
        return redis.error_reply('ERR count.lua: ' .. KEYS[1] .. ' holds no numbers of ' .. id)
    end
    for missing = #values + 1, place do
        values[missing] = 0
    end
    before = values[place]
else
    loaded, set_at = unpack(redis.call('HMGET', KEYS[2], '_', '_s'))
    local found
    if field then
        found = redis.call('HGET', KEYS[1], field)
    else
        found = redis.call('GET', KEYS[1])
    end
    before = read(found or '0')
    if not before then
        return redis.error_reply('ERR count.lua: ' .. KEYS[1] .. ' holds no number')
    end
end
loaded = loaded and string.sub(loaded, 1, 1) ~= '~'

local added
if ARGV[3] == 'add' then
    added = number
elseif ARGV[3] == 'set' then
    added = number - before
else
    return redis.error_reply('ERR count.lua: ARGV[3] is neither "add" nor "set"')
end
-- Adding 0 turns -0 into 0.
local after = before + added + 0
if math.abs(after) > exact or math.abs(added) > exact then
    return redis.error_reply('ERR count.lua: the number of ' .. id .. ' would no longer be exact')
end
local time = redis.call('TIME')
local at = time[1] * 1000000 + time[2]
set_at = tonumber(set_at or 0)
if ARGV[6] and ARGV[6] ~= '0' then
    at = tonumber(ARGV[6])
    if set_at >= at then
        return { 1, ARGV[6], loaded and before, 0 }
    end
elseif ARGV[6] and set_at >= at and set_at < at + 300000000 then
    -- The clock went back, and MySQL rejects events that are older than a set. A set event whose `at` is five minutes or
    -- more in the future does not matter, because the daemon rejects such a set event (future_max).
    at = set_at + 1
end
at = string.format('%.0f', at)
local below = after < 0 and (added < 0 or ARGV[3] == 'set')
if below and loaded and ARGV[5] ~= '1' then
    return { 0, at, before, 0 }
end

if ARGV[3] == 'set' then
    redis.call('HSET', place and KEYS[1] or KEYS[2], '_s', at)
end
if not place then
    local by = string.format('%.0f', added)
    if field then
        redis.call('HINCRBY', KEYS[1], field, by)
    else
        redis.call('INCRBY', KEYS[1], by)
    end
    return { 1, at, loaded and after, added }
end
values[place] = after
local filled = #values
while filled > 0 and values[filled] == 0 do
    filled = filled - 1
end
if filled == 0 then
    redis.call('HDEL', KEYS[1], id)
else
    for index = 1, filled do
        values[index] = string.format('%.0f', values[index])
    end
    redis.call('HSET', KEYS[1], id, table.concat(values, ',', 1, filled))
end
return { 1, at, loaded and after, added }

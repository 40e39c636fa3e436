-- Takes back a like or an unlike that could not be published, unless another request can still publish it. Call this
-- script once for each answer of like.lua whose event was not published.
--
-- KEYS[1]  the key of the target's number, as in like.lua.
-- KEYS[2]  the recent clicks in this bucket.
-- KEYS[3]  the earlier clicks.
-- ARGV[1]  the target's id in decimal.
-- ARGV[2]  the place of the metric in the field's value, "entity:" and its field, or "string", as in like.lua.
-- ARGV[3]  "like" or "unlike": the click to take back.
-- ARGV[4]  the user's id in decimal.
-- ARGV[5]  the `at` that like.lua returned.
--
-- Returns 1 if the click was taken back. Then Redis remembers the state before the click. Returns 0, and does not
-- change the number, if another request got the same event from like.lua and has not called this script yet. Also
-- returns 0 if the user has clicked again since, or if Redis no longer remembers the click. If a newer click is
-- published, it decides the user's state.
--
-- If the field is not a list of numbers, the script fails and changes nothing.

-- Returns the numbers in a field's text. Returns nil if the text is not a list of numbers.
local function read(text)
    local values = {}
    for value in string.gmatch(text and text .. ',' or '', '([^,]*),') do
        if not string.match(value, '^%-?%d+$') then
            return nil
        end
        values[#values + 1] = tonumber(value)
    end
    return values
end

local field = ARGV[1] .. ':' .. ARGV[4]
local mine = ARGV[5] .. (ARGV[3] == 'like' and '+' or '-')
local key = KEYS[2]
local last = redis.call('HGET', key, field)
if not last then
    key = KEYS[3]
    last = redis.call('HGET', key, field)
end
if last ~= mine then
    return 0
end
local others = tonumber(redis.call('HGET', key, field .. ':' .. ARGV[5]) or 0)
if others > 0 then
    redis.call('HSET', key, field .. ':' .. ARGV[5], others - 1)
    return 0
end
local place = tonumber(ARGV[2])
local values = place and read(redis.call('HGET', KEYS[1], ARGV[1]))
if place and not values then
    return redis.error_reply('ERR take_back.lua: ' .. KEYS[1] .. ' holds no numbers of ' .. ARGV[1])
end
-- The event may have reached RabbitMQ although the API server got no confirm. So the script remembers an instant that
-- is later than the event's `at`.
redis.call('HSET', key, field, string.format('%.0f', ARGV[5] + 1) .. (ARGV[3] == 'like' and '-' or '+'))
local delta = ARGV[3] == 'like' and -1 or 1
if not place then
    local name = string.match(ARGV[2], '^entity:(.+)$')
    if name then
        redis.call('HINCRBY', KEYS[1], name, delta)
    else
        redis.call('INCRBY', KEYS[1], delta)
    end
    return 1
end
for missing = #values + 1, place do
    values[missing] = 0
end
values[place] = values[place] + delta
local filled = #values
while filled > 0 and values[filled] == 0 do
    filled = filled - 1
end
if filled == 0 then
    redis.call('HDEL', KEYS[1], ARGV[1])
    return 1
end
for index = 1, filled do
    values[index] = string.format('%.0f', values[index])
end
redis.call('HSET', KEYS[1], ARGV[1], table.concat(values, ',', 1, filled))
return 1

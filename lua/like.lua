-- Counts a like or an unlike in the packed layout, and gives the instant of it.
--
-- KEYS[1]  the target's bucket, for instance c:{video:1a2f}
-- ARGV[1]  the target's id in decimal: the field
-- ARGV[2]  the place of the metric in the field's value: its code in [metrics], from 1
-- ARGV[3]  "like" or "unlike"
--
-- Returns { at, count }: this server's clock in microseconds since the epoch as text, which the event must carry as
-- `at`; and the target's number after this, or nil where that is unknown, because Redis has lost the bucket (it has no
-- field `_`) or is still getting it back. The like counts all the same.
--
-- A field holds the metrics in the order of their codes as text, `12,3,0,4`, trailing zeros left out; a target of
-- which everything is zero has no field.

local deltas = { like = 1, unlike = -1 }
local delta = deltas[ARGV[3]]
if not delta then
    return redis.error_reply('ERR like.lua: ARGV[3] is neither "like" nor "unlike"')
end
local place = tonumber(ARGV[2])

local found = redis.call('HMGET', KEYS[1], ARGV[1], '_')
local loaded = found[2] and string.sub(found[2], 1, 1) ~= '~'
local values = {}
for value in string.gmatch(found[1] or '', '[^,]+') do
    values[#values + 1] = tonumber(value)
end
for missing = #values + 1, place do
    values[missing] = 0
end
values[place] = values[place] + delta
local count = values[place]

local last = #values
while last > 0 and values[last] == 0 do
    last = last - 1
end
if last == 0 then
    redis.call('HDEL', KEYS[1], ARGV[1])
else
    for index = 1, last do
        values[index] = string.format('%.0f', values[index])
    end
    redis.call('HSET', KEYS[1], ARGV[1], table.concat(values, ',', 1, last))
end

local now = redis.call('TIME')
return { string.format('%.0f', now[1] * 1000000 + now[2]), loaded and count }

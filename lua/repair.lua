-- Adds measured drifts to targets of one bucket, once.
--
-- KEYS[1]  the bucket
-- ARGV[1]  the field `_` as the sample saw it
-- ARGV[2]  the field `_` as it shall be: the same loader, this repair's number
-- ARGV[3]  the place of the metric in a field's value, from 1
-- ARGV[4]  the latest instant of the repair, by this server's clock: later, another run can have measured
-- ARGV     then for each target: id, what is added; "5@12" adds only where no number of the bucket was set since the instant 12, for
--          numbers that are also set; with "!" behind it also where the number goes below zero
--
-- Returns for each target 1 (done), 0 (it would have gone below zero: left alone) or 2 (it can have been set, or is no list of numbers: left alone), or an empty list when the bucket
-- was repaired, flushed or loaded again since the sample, or it is too late. So a repair that timed out and runs late is never added twice.

local now = redis.call('TIME')
if (redis.call('HGET', KEYS[1], '_') or '') ~= ARGV[1] or now[1] * 1000000 + now[2] > tonumber(ARGV[4]) then
    return {}
end
now = now[1] * 1000000 + now[2]
-- A set from the future is from before the clock was put back.
local set_at = tonumber(redis.call('HGET', KEYS[1], '_s') or 0)
if set_at > now then
    set_at = 0
end
-- The numbers of a field; nil where it holds something else.
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

local place = tonumber(ARGV[3])
local ids = {}
for index = 5, #ARGV, 2 do
    ids[#ids + 1] = ARGV[index]
end
local before = redis.call('HMGET', KEYS[1], unpack(ids))
local done, fields = {}, { '_', ARGV[2] }
for number, id in ipairs(ids) do
    local text, only, below_zero = string.match(ARGV[4 + 2 * number], '^(%-?%d+)@?(%-?%d*)(!?)$')
    local added = tonumber(text)
    if not before[number] and place == 1 and added > 0 and only == '' then
        fields[#fields + 1] = id
        fields[#fields + 1] = text
        done[number] = 1
    else
        local values = read(before[number])
        local was = values and (values[place] or 0)
        if not values or only ~= '' and set_at >= tonumber(only) then
            done[number] = 2
        elseif added < 0 and was + added < 0 and below_zero == '' then
            done[number] = 0
        else
            for missing = #values + 1, place do
                values[missing] = 0
            end
            values[place] = was + added
            local last = #values
            while last > 0 and values[last] == 0 do
                last = last - 1
            end
            if last == 0 then
                redis.call('HDEL', KEYS[1], id)
            else
                for position = 1, last do
                    values[position] = string.format('%.0f', values[position])
                end
                fields[#fields + 1] = id
                fields[#fields + 1] = table.concat(values, ',', 1, last)
            end
            done[number] = 1
        end
    end
end
redis.call('HSET', KEYS[1], unpack(fields))
return done

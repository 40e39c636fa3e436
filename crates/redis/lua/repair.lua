-- Repairs numbers of one bucket: adds the drift (the difference from MySQL that a run has measured) to each number.
-- Each drift is added at most once.
--
-- KEYS[1]  the bucket.
-- ARGV[1]  the field `_` as it was in the sample.
-- ARGV[2]  the new value of `_`: the same loader as in ARGV[1], and the number of this repair.
-- ARGV[3]  the latest instant at which the repair can run, by this server's clock. After this instant, another run can
--          measure the same drift (decision 0030).
-- ARGV     then three arguments for each number: the target's id, the metric's position in a field's value (the first
--          position is 1), and the amount. "5@12" is for numbers that can also be set: 5 is added only if no number of
--          the bucket was set since the instant 12. A "!" at the end allows a result below zero.
--
-- Returns one result for each number:
--          1  the amount was added.
--          0  skipped, because the number would have gone below zero.
--          2  skipped, because the number may have been set, or because the target's field is not a list of numbers.
-- Returns an empty list if the bucket was repaired, flushed or loaded again after the run had taken its sample, or if
-- the time in ARGV[3] has passed. So if a repair timed out and runs late, its amount is still never added twice
-- (decision 0029).

local now = redis.call('TIME')
if (redis.call('HGET', KEYS[1], '_') or '') ~= ARGV[1] or now[1] * 1000000 + now[2] > tonumber(ARGV[3]) then
    return {}
end
now = now[1] * 1000000 + now[2]
-- If the last set event has a time in the future, lua/count.lua stored this time before the clock was put back. Every
-- further set event gets a later time from lua/count.lua. So if this time is at most five minutes in the future, the
-- script still skips repairs that are older than this time.
local set_at = tonumber(redis.call('HGET', KEYS[1], '_s') or 0)
if set_at > now + 300000000 then
    set_at = 0
end
-- Returns the numbers in a field's text. Returns false if the text is not a list of numbers.
local function read(text)
    local values = {}
    if not text then
        return values
    end
    for value in string.gmatch(text .. ',', '([^,]*),') do
        if not string.match(value, '^%-?%d+$') then
            return false
        end
        values[#values + 1] = tonumber(value)
    end
    return values
end

local ids, targets, changed, done = {}, {}, {}, {}
for index = 4, #ARGV, 3 do
    local id = ARGV[index]
    if not targets[id] then
        ids[#ids + 1] = id
        targets[id] = true
    end
end
for place, text in ipairs(redis.call('HMGET', KEYS[1], unpack(ids))) do
    targets[ids[place]] = read(text)
end
for index = 4, #ARGV, 3 do
    local id, place, text = ARGV[index], tonumber(ARGV[index + 1]), ARGV[index + 2]
    local added, only, below_zero = tonumber(text), '', ''
    if not added then
        text, only, below_zero = string.match(text, '^(%-?%d+)@?(%-?%d*)(!?)$')
        added = tonumber(text)
    end
    local values = targets[id]
    local was = values and (values[place] or 0)
    if not values or only ~= '' and set_at >= tonumber(only) then
        done[#done + 1] = 2
    elseif added < 0 and was + added < 0 and below_zero == '' then
        done[#done + 1] = 0
    else
        for missing = #values + 1, place - 1 do
            values[missing] = 0
        end
        values[place] = was + added
        changed[id] = true
        done[#done + 1] = 1
    end
end
local fields = { '_', ARGV[2] }
for _, id in ipairs(ids) do
    if changed[id] then
        local values = targets[id]
        local last = #values
        while last > 0 and values[last] == 0 do
            last = last - 1
        end
        if last == 0 then
            redis.call('HDEL', KEYS[1], id)
        else
            for position = 1, last do
                -- Lua writes an integer with at most 14 digits exactly.
                if math.abs(values[position]) >= 1e14 then
                    values[position] = string.format('%.0f', values[position])
                end
            end
            fields[#fields + 1] = id
            fields[#fields + 1] = table.concat(values, ',', 1, last)
        end
    end
end
redis.call('HSET', KEYS[1], unpack(fields))
return done

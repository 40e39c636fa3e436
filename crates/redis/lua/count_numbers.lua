-- Counts the nonzero numbers in a bucket.
--
-- KEYS[1]  the bucket.
-- ARGV     the metrics to count. The value of a field is a list with one number for each metric. Each argument is the
--          position of a metric in this list. The first position is 1.
--
-- Returns the number of fields of the bucket, and the number of nonzero numbers of these metrics.

local wanted, last = {}, 0
for _, place in ipairs(ARGV) do
    wanted[tonumber(place)] = true
    last = math.max(last, tonumber(place))
end
local count = 0
local found = redis.call('HGETALL', KEYS[1])
for index = 1, #found, 2 do
    -- Fields that begin with `_` are not targets. They contain the state of the load, and the marks of the outbox.
    if string.byte(found[index]) ~= 95 then
        local place = 0
        for number in string.gmatch(found[index + 1] .. ',', '([^,]*),') do
            place = place + 1
            if wanted[place] and number ~= '0' and string.find(number, '^%-?%d+$') then
                count = count + 1
            end
            if place == last then
                break
            end
        end
    end
end
return { #found / 2, count }

-- Counts the targets of a bucket whose number of one metric is not zero.
--
-- KEYS[1]  the bucket
-- ARGV[1]  the place of the metric in a field's value, from 1
--
-- Returns how many there are.

local pattern = '^' .. string.rep('[^,]*,', ARGV[1] - 1) .. '(-?%d+)'
local count = 0
local found = redis.call('HGETALL', KEYS[1])
for index = 1, #found, 2 do
    -- Other fields than ids say who loaded the bucket, and what was added to it.
    if string.byte(found[index]) ~= 95 then
        local number = string.match(found[index + 1], pattern)
        if number and number ~= '0' then
            count = count + 1
        end
    end
end
return count

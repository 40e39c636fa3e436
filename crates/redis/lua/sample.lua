-- Reads targets of one bucket at one instant.
--
-- KEYS[1]   the bucket.
-- ARGV      the targets' ids in decimal.
--
-- Returns one text of several parts, separated by \0:
-- * this server's clock in microseconds since the epoch: the cut;
-- * the field `_`, which contains the bucket's loader and the last repair. This part is empty if the field is missing;
-- * each target's field, or nothing;
-- * the bucket's marks (apply.lua) as "0:17,3:12".
--
-- The answer is one text, because each element of a list would take as much time as the read of a field. The script is
-- atomic. So every like that was counted in the bucket before this call has an `at` before the cut (the time in the
-- answer). Every later like has a later `at`.

local now = redis.call('TIME')
local found = redis.call('HMGET', KEYS[1], '_o', '_', unpack(ARGV))
local marks = {}
if found[1] then
    local names = { '_65535' }
    for partition = 0, found[1] - 1 do
        names[partition + 2] = '_' .. partition
    end
    for partition in string.gmatch(redis.call('HGET', KEYS[1], '_m') or '', '%d+') do
        names[#names + 1] = '_' .. partition
    end
    for place, number in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do
        if number and number ~= '0' then
            marks[#marks + 1] = string.sub(names[place], 2) .. ':' .. number
        end
    end
end
found[1] = string.format('%.0f', now[1] * 1000000 + now[2])
for index = 2, #ARGV + 2 do
    found[index] = found[index] or ''
end
found[#ARGV + 3] = table.concat(marks, ',')
return table.concat(found, '\0')

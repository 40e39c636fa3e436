-- Reads numbers of one bucket at one instant, in the layouts string and entity.
--
-- KEYS[1]   the bucket: its field `_`, and its marks.
-- KEYS      then the key of each number.
-- ARGV      the place of the number in each of these keys, or one place for all keys: "entity:" and the name of the
--           hash's field, for instance "entity:like"; or "string".
--
-- Returns one text of several parts, separated by \0, like sample.lua:
-- * this server's clock in microseconds since the epoch;
-- * the field `_`, or nothing;
-- * each number, or nothing; "?" if its key has the wrong type;
-- * the bucket's marks.

local now = redis.call('TIME')
local bucket = redis.call('HMGET', KEYS[1], '_', '_o', '_m')
local parts = { string.format('%.0f', now[1] * 1000000 + now[2]), bucket[1] or '' }
for index = 2, #KEYS do
    local field = string.match(ARGV[index - 1] or ARGV[1], '^entity:(.+)$')
    local found
    if field then
        found = redis.pcall('HGET', KEYS[index], field)
    else
        found = redis.pcall('GET', KEYS[index])
    end
    parts[index + 1] = type(found) == 'table' and '?' or found or ''
end
local marks = {}
if bucket[2] then
    local names = { '_65535' }
    for partition = 0, bucket[2] - 1 do
        names[partition + 2] = '_' .. partition
    end
    for partition in string.gmatch(bucket[3] or '', '%d+') do
        names[#names + 1] = '_' .. partition
    end
    for place, number in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do
        if number and number ~= '0' then
            marks[#marks + 1] = string.sub(names[place], 2) .. ':' .. number
        end
    end
end
parts[#parts + 1] = table.concat(marks, ',')
return table.concat(parts, '\0')

-- Reads targets of one bucket at one instant.
--
-- KEYS[1]   the bucket
-- ARGV      the targets' ids in decimal
--
-- Returns one text, its parts separated by \0: this server's clock in microseconds since the epoch; the field `_` (who
-- loaded the bucket and the last repair), empty where there is none; each target's field, empty where there is none. One
-- text, because each part of a list costs as much as reading a field does. A script is atomic, so every like that has
-- counted here has an `at` before the cut, and every other one after.

local now = redis.call('TIME')
local found = redis.call('HMGET', KEYS[1], '_', unpack(ARGV))
for index = 1, #ARGV + 1 do
    found[index] = found[index] or ''
end
return string.format('%.0f', now[1] * 1000000 + now[2]) .. '\0' .. table.concat(found, '\0')

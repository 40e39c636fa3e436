-- Says that a bucket is being loaded, or that it is loaded. Until then its missing targets are unknown, not zero.
--
-- KEYS[1]  the bucket
-- ARGV[1]  "begin" or "end"
-- ARGV[2]  the number of the run that loads it
-- ARGV[3]  begin: the last number of each partition's outbox, read before this, as "0:17,3:12"
--
-- begin: a bucket that nobody has loaded gets the field `_` = "~RUN:0", and its marks (apply.lua) are raised to those numbers: what these rows
-- have for the bucket is loaded, and never added afterwards. Returns { cut, id, value, id, value, ... }, this server's clock in
-- microseconds since the epoch as text and what the bucket holds then; an empty list where it is loaded.
-- end: "~RUN:N" becomes "RUN:N". Returns 1 where it did; 0 where the bucket was flushed or taken by another run since.

-- Raises the bucket's marks.
local function raise(text)
    local marks, count = {}, redis.call('HGET', KEYS[1], '_o')
    if not count and text == '' then
        return
    end
    count = tonumber(count or 0)
    for partition = 0, count - 1 do
        marks[partition] = tonumber(redis.call('HGET', KEYS[1], '_' .. partition) or 0)
    end
    -- Those of maps, and of what reconciles correct.
    local beyond = { 65535 }
    for partition in string.gmatch(redis.call('HGET', KEYS[1], '_m') or '', '%d+') do
        beyond[#beyond + 1] = tonumber(partition)
    end
    for _, partition in ipairs(beyond) do
        marks[partition] = tonumber(redis.call('HGET', KEYS[1], '_' .. partition) or 0)
    end
    for partition, number in string.gmatch(text, '(%d+):(%d+)') do
        partition, number = tonumber(partition), tonumber(number)
        if partition < 60000 then
            count = math.max(count, partition + 1)
        elseif not marks[partition] then
            beyond[#beyond + 1] = partition
        end
        marks[partition] = math.max(marks[partition] or 0, number)
    end
    -- All marks below `_o` are there, so that fields can be counted.
    local fields = { '_o', count }
    if #beyond > 1 then
        fields = { '_o', count, '_m', table.concat(beyond, ',', 2) }
    end
    local function put(partition)
        fields[#fields + 1] = '_' .. partition
        fields[#fields + 1] = string.format('%.0f', marks[partition] or 0)
    end
    for partition = 0, count - 1 do
        put(partition)
    end
    for _, partition in ipairs(beyond) do
        put(partition)
    end
    redis.call('HSET', KEYS[1], unpack(fields))
end

local state = redis.call('HGET', KEYS[1], '_') or ''
if ARGV[1] == 'begin' then
    if state ~= '' and string.sub(state, 1, 1) ~= '~' then
        return {}
    end
    local now = redis.call('TIME')
    local found = redis.call('HGETALL', KEYS[1])
    redis.call('HSET', KEYS[1], '_', '~' .. ARGV[2] .. ':0')
    table.insert(found, 1, string.format('%.0f', now[1] * 1000000 + now[2]))
    raise(ARGV[3])
    return found
end
local mine = '~' .. ARGV[2] .. ':'
if string.sub(state, 1, #mine) ~= mine then
    return 0
end
redis.call('HSET', KEYS[1], '_', string.sub(state, 2))
return 1

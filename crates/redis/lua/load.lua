-- Marks a bucket as being loaded, or as loaded. While a bucket is not marked as loaded, the numbers of targets without
-- a field are unknown, not zero (decision 0024).
--
-- KEYS[1]  the bucket.
-- ARGV[1]  "begin" or "end".
-- ARGV[2]  the number of the run that loads the bucket.
-- ARGV[3]  begin: the number of the last row in each partition's outbox, read before this call, as "0:17,3:12".
--
-- begin: if the bucket is not loaded, its field `_` becomes "~RUN:0", and its marks (apply.lua) are raised to the
-- numbers of ARGV[3]. The run loads numbers that already include the outbox rows up to ARGV[3]. So the daemon does not
-- add these rows to the bucket later (decision 0025). Returns { cut, id, value, id, value, ... }: this server's clock
-- in microseconds since the epoch, as text, and the bucket's content at that instant. Returns an empty list if the
-- bucket is loaded.
--
-- end: "~RUN:N" becomes "RUN:N". Returns 1. Returns 0 if the bucket was flushed since "begin", or if another run is
-- loading the bucket.

-- Raises the bucket's marks to the numbers in the text.
local function raise(text)
    local marks, count = {}, redis.call('HGET', KEYS[1], '_o')
    if not count and text == '' then
        return
    end
    count = tonumber(count or 0)
    for partition = 0, count - 1 do
        marks[partition] = tonumber(redis.call('HGET', KEYS[1], '_' .. partition) or 0)
    end
    -- The script also raises the marks of maps and the mark of corrections (65535).
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
    -- Lower partitions without a mark get the mark 0, so `_o` is the number of mark fields.
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

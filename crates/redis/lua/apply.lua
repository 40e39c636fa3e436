-- Adds outbox rows of one partition to buckets. For each bucket, the script adds all of these rows or no row, and never
-- adds a row twice.
--
-- KEYS     the buckets; on a Cluster only one.
-- ARGV[1]  the partition.
-- ARGV[2]  the lowest accepted mark of a bucket.
-- ARGV[3]  the highest accepted mark of a bucket. The call contains all additions of the rows after this mark.
-- ARGV[4]  the number of the last row.
-- ARGV     then the additions to each bucket: the number of targets, the ids of the targets, and one text of amounts
--          for each target. "1" adds 1 to the first metric, and "0,0,1" adds 1 to the third metric.
--
-- A bucket stores a mark for each partition. The mark is the number of a row: the bucket contains this row and all rows
-- before it. The marks are the fields `_0`, `_1` and so on. `_65535` is the mark for the corrections that reconciles
-- make. If the field `_o` is 3, the bucket has the marks `_0`, `_1` and `_2`. The partitions with the number 60000 or
-- higher belong to maps. If such a partition has a mark in the bucket, the field `_m` contains the partition's number,
-- for example "60001,60007".
--
-- If the mark of a bucket is not between ARGV[2] and ARGV[3], the bucket already has some of the rows, or lacks earlier
-- rows. The script skips such a bucket. So no row is added twice, even if a call arrives twice or late, or if two
-- daemons send the same call. The mark and the numbers are in the same hash, so Redis can lose them only together
-- (decision 0020).
--
-- Returns { left, place, mark, place, mark, ... }. `left` is the number of targets that were skipped, because their
-- field is not a list of numbers. After `left`, two numbers follow for each skipped bucket: the index of the bucket's
-- key in KEYS, and the bucket's mark. If the key does not contain a hash, the returned mark is -1.

local partition, lowest, highest, last = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local mark_field = '_' .. partition
-- One read or write has at most this number of ids, because Lua's stack holds only about 8,000 values.
local PIECE = 1000
-- The script formats numbers above this limit, because Redis would write very large numbers with an exponent.
local PLAIN_MAX = 1e15

-- Returns the numbers in a field's text. Returns nil if the text is not a list of numbers.
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

-- Adds an amount, given as text, to a number. If the amount has more digits than a double can hold, it is added in two
-- exact steps.
local function plus(value, text)
    local sign, high, low = string.match(text, '^(%-?)(%d+)(%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d)$')
    if not high then
        return value + text
    end
    return value + tonumber(sign .. high) * 1e15 + tonumber(sign .. low)
end

-- Returns the field's text after the addition. Returns '' if all numbers are zero, and nil if the field was not a list
-- of numbers.
local function sum(held, delta)
    if tonumber(delta) and (not held or string.find(held, '^%-?%d+$')) then
        local value = plus(held or 0, delta)
        if value == 0 then
            return ''
        end
        return value > -PLAIN_MAX and value < PLAIN_MAX and value or string.format('%.0f', value)
    end
    local values, place = read(held), 0
    if not values then
        return nil
    end
    for text in string.gmatch(delta, '[^,]+') do
        place = place + 1
        values[place] = plus(values[place] or 0, text)
    end
    local filled = #values
    while filled > 0 and values[filled] == 0 do
        filled = filled - 1
    end
    for place = 1, filled do
        values[place] = string.format('%.0f', values[place])
    end
    return table.concat(values, ',', 1, filled)
end

-- Appends the fields that a bucket needs for its first mark of this partition. Lower partitions without a mark get the
-- mark 0, so `_o` is the number of mark fields.
local function begin_marks(key, fields)
    local marks = redis.call('HMGET', key, '_o', '_m')
    local known = marks[1]
    local count = tonumber(known or 0) or 0
    local wanted = tonumber(partition) >= 60000 and count or math.max(count, partition + 1)
    local function put(field, value)
        fields[#fields + 1] = field
        fields[#fields + 1] = value
    end
    for missing = count, wanted - 1 do
        if tostring(missing) ~= partition then
            put('_' .. missing, '0')
        end
    end
    if not known and partition ~= '65535' then
        put('_65535', '0')
    end
    if tonumber(partition) >= 60000 and partition ~= '65535' then
        put('_m', marks[2] and marks[2] .. ',' .. partition or partition)
    end
    put('_o', wanted)
end

-- Adds the amounts to some targets of one bucket. The first of these targets has the index `from`, and the last has the
-- index `to`. The arguments of the bucket begin at `index`. Returns how many targets were skipped. The first element of
-- `held` is the bucket's mark.
local function add(key, fields, held, index, count, from, to)
    local left, emptied = 0, nil
    local filled = #fields
    for at = from, to do
        local before = held[at - from + 2]
        local value = sum(before, ARGV[index + count + at])
        if not value then
            left = left + 1
        elseif value ~= '' then
            fields[filled + 1] = ARGV[index + at]
            fields[filled + 2] = value
            filled = filled + 2
        elseif before then
            emptied = emptied or {}
            emptied[#emptied + 1] = ARGV[index + at]
        end
    end
    if filled > 0 then
        redis.call('HSET', key, unpack(fields))
    end
    if emptied then
        redis.call('HDEL', key, unpack(emptied))
    end
    return left
end

local answer, index = { 0 }, 5
for place, key in ipairs(KEYS) do
    local count = tonumber(ARGV[index])
    local held = redis.pcall('HMGET', key, mark_field, unpack(ARGV, index + 1, index + math.min(count, PIECE)))
    if held.err and not string.find(held.err, 'WRONGTYPE', 1, true) then
        return held
    end
    local mark = tonumber(held[1] or 0) or 0
    if held.err or mark < lowest or mark > highest then
        answer[#answer + 1] = place
        answer[#answer + 1] = held.err and '-1' or string.format('%.0f', mark)
    else
        -- The write of the first piece also contains the mark. If memory is full, Redis refuses this write, and nothing
        -- changes. If Redis accepts this write, it also accepts the writes of the other pieces.
        local fields = { mark_field, last }
        if not held[1] then
            begin_marks(key, fields)
        end
        for from = 1, count, PIECE do
            local to = math.min(from + PIECE - 1, count)
            if from > 1 then
                held, fields = redis.call('HMGET', key, mark_field, unpack(ARGV, index + from, index + to)), {}
            end
            answer[1] = answer[1] + add(key, fields, held, index, count, from, to)
        end
    end
    index = index + 1 + 2 * count
end
return answer

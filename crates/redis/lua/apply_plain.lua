-- Adds outbox rows of one partition to the numbers of one bucket, and never adds a row twice. This script is for the
-- layouts entity and string (see apply.lua).
--
-- KEYS[1]  the bucket, which has the marks.
-- KEYS     then the keys of the numbers.
-- ARGV[1]  the partition.
-- ARGV     then the outbox rows with additions for this bucket, in order. Each row begins with the row's number and the
--          count of additions. Each addition has three arguments: an index of KEYS; "entity:" with the hash's field, or
--          "string"; the amount.
--
-- Returns { left, 1, mark }. `left` is the number of keys that were skipped, because they hold no number. `mark` is the
-- bucket's mark before the call. A mark of -1 means that the bucket is not a hash or that someone changed its mark,
-- and nothing was done.

local partition = ARGV[1]
local kept = redis.pcall('HMGET', KEYS[1], '_' .. partition, '_o', '_m')
if kept.err and not string.find(kept.err, 'WRONGTYPE', 1, true) then
    return kept
end
local mark = kept.err and -1 or tonumber(kept[1] or 0) or 0
if mark < 0 then
    return { 0, 1, '-1' }
end
local last, index = mark, 2
local added, order = {}, {}
while ARGV[index] do
    local number, after = tonumber(ARGV[index]), index + 2 + 3 * ARGV[index + 1]
    if number > last then
        for at = index + 2, after - 1, 3 do
            local of, part = ARGV[at], ARGV[at + 1]
            if not added[of] then
                added[of] = {}
                order[#order + 1] = of
            end
            local sum = added[of][part] or { 0, 0 }
            -- If the amount has more digits than a double can hold, it is added in two parts.
            local sign, high, low = string.match(ARGV[at + 2], '^(%-?)(%d+)(%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d)$')
            added[of][part] = { sum[1] + (high and sign .. high or 0), sum[2] + (high and sign .. low or ARGV[at + 2]) }
        end
        last = number
    end
    index = after
end
local before = string.format('%.0f', mark)
if last == mark then
    return { 0, 1, before }
end

local fields = { '_' .. partition, string.format('%.0f', last) }
local function put(field, value)
    fields[#fields + 1] = field
    fields[#fields + 1] = value
end
if not kept[1] then
    -- Lower partitions without a mark get the mark 0, so `_o` is the number of mark fields.
    local count = tonumber(kept[2] or 0) or 0
    local wanted = tonumber(partition) >= 60000 and count or math.max(count, partition + 1)
    for missing = count, wanted - 1 do
        if tostring(missing) ~= partition then
            put('_' .. missing, '0')
        end
    end
    if not kept[2] and partition ~= '65535' then
        put('_65535', '0')
    end
    if tonumber(partition) >= 60000 and partition ~= '65535' then
        put('_m', kept[3] and kept[3] .. ',' .. partition or partition)
    end
    put('_o', wanted)
end

-- The marks are written first, because a repeated call must not add the rows again if a later command fails.
redis.call('HSET', KEYS[1], unpack(fields))
local left = 0
for _, of in ipairs(order) do
    local key = KEYS[tonumber(of)]
    for part, sum in pairs(added[of]) do
        local field, done = string.match(part, '^entity:(.+)$'), nil
        for _, delta in ipairs({ sum[1] * 1e15, sum[2] }) do
            if delta ~= 0 and field then
                done = redis.pcall('HINCRBY', key, field, string.format('%.0f', delta))
            elseif delta ~= 0 then
                done = redis.pcall('INCRBY', key, string.format('%.0f', delta))
            end
        end
        if type(done) == 'table' then
            left = left + 1
        end
    end
end
return { left, 1, before }

-- Adds rows of one partition's outbox to numbers of one bucket, each row once.
--
-- KEYS[1]  the bucket
-- KEYS     then, in the layouts string and entity, the keys of the numbers
-- ARGV[1]  the partition
-- ARGV     then for each row that has something for this bucket, in order: its number, for how many numbers, and for each of these: the target's
--          id and the metric's place in a field's value, from 1; or which of KEYS and "entity:" with the hash's field, or "string"; and
--          what is added
--
-- The bucket holds a mark for each partition, the number of the last row that was added to it: the fields `_0`, `_1` and so on, and `_65535`
-- for what reconciles correct. `_o` says how many there are beside that one. Rows up to the mark are left out, so that a call that comes twice,
-- late, or from two daemons adds nothing twice; and mark and numbers are lost together.
--
-- Returns { left, mark }: how many targets were left alone because what they hold is no numbers, and the mark as it was; -1 where the bucket
-- is no hash: then nothing is done.

local partition = ARGV[1]
local kept = redis.pcall('HMGET', KEYS[1], '_' .. partition, '_o')
if kept.err then
    return string.find(kept.err, 'WRONGTYPE', 1, true) and -1 or kept
end
local mark = tonumber(kept[1] or 0) or 0
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
            added[of][part] = (added[of][part] or 0) + ARGV[at + 2]
        end
        last = number
    end
    index = after
end
local before = string.format('%.0f', mark)
if last == mark then
    return { 0, before }
end

local fields = { '_' .. partition, string.format('%.0f', last) }
local function put(field, value)
    fields[#fields + 1] = field
    fields[#fields + 1] = value
end
if not kept[1] then
    -- All marks below `_o` are there, so that fields can be counted.
    local count = tonumber(kept[2] or 0) or 0
    local wanted = partition == '65535' and count or math.max(count, partition + 1)
    for missing = count, wanted - 1 do
        if tostring(missing) ~= partition then
            put('_' .. missing, '0')
        end
    end
    if not kept[2] and partition ~= '65535' then
        put('_65535', '0')
    end
    put('_o', wanted)
end

local left = 0
if #KEYS > 1 then
    -- First: should one of the others fail, this call must not run again.
    redis.call('HSET', KEYS[1], unpack(fields))
    for _, of in ipairs(order) do
        local key = KEYS[tonumber(of)]
        for part, delta in pairs(added[of]) do
            local field, done = string.match(part, '^entity:(.+)$'), nil
            if delta ~= 0 and field then
                done = redis.pcall('HINCRBY', key, field, string.format('%.0f', delta))
            elseif delta ~= 0 then
                done = redis.pcall('INCRBY', key, string.format('%.0f', delta))
            end
            if type(done) == 'table' then
                left = left + 1
            end
        end
    end
    return { left, before }
end

-- The numbers of a field; nil where it holds something else.
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

-- In pieces, because Lua's stack holds about 8,000. The first one has the mark: where Redis refuses that (memory is full), nothing is done; where
-- it doesn't, it refuses none of the others.
for from = 1, #order, 1000 do
    local ids = { unpack(order, from, math.min(from + 999, #order)) }
    local held = redis.call('HMGET', KEYS[1], unpack(ids))
    local emptied = {}
    for position, id in ipairs(ids) do
        local values = read(held[position])
        if values then
            for part, delta in pairs(added[id]) do
                local place = tonumber(part)
                for missing = #values + 1, place do
                    values[missing] = 0
                end
                values[place] = values[place] + delta
            end
            local filled = #values
            while filled > 0 and values[filled] == 0 do
                filled = filled - 1
            end
            for place = 1, filled do
                values[place] = string.format('%.0f', values[place])
            end
            if filled > 0 then
                put(id, table.concat(values, ',', 1, filled))
            elseif held[position] then
                emptied[#emptied + 1] = id
            end
        else
            left = left + 1
        end
    end
    if #fields > 0 then
        redis.call('HSET', KEYS[1], unpack(fields))
    end
    if #emptied > 0 then
        redis.call('HDEL', KEYS[1], unpack(emptied))
    end
    fields = {}
end
return { left, before }

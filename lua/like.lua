-- Sets whether a user likes a target. Counts the click if it changes something, and returns the instant of the click.
--
-- KEYS[1]  the key of the target's number: its bucket, for instance tally:c:{video:3a2f}; in the layouts entity and
--          string a separate key.
-- KEYS[2]  the recent clicks in this bucket: tally:recent:{video:3a2f}.
-- KEYS[3]  the earlier clicks: tally:recent:{video:3a2f}:former.
-- KEYS[4]  in the layouts entity and string the target's bucket: its field `_` says whether Redis has lost something.
-- ARGV[1]  the target's id in decimal: the field of a bucket.
-- ARGV[2]  the place of the metric in the field's value: its code in [metrics], from 1. In the layout entity, the
--          text "entity:" and the name of the hash's field, for instance "entity:like". In the layout string, the
--          text "string".
-- ARGV[3]  "like" or "unlike".
-- ARGV[4]  the user's id in decimal.
-- ARGV[5]  the minimum number of seconds for which a click is remembered: more than an event needs to reach MySQL.
-- ARGV[6]  the user's row in MySQL, in the format of a remembered click: `update_at` in microseconds since the epoch,
--          then "+", or "-" if is_del is 1; "0-" if there is no row. Empty if MySQL was not asked.
-- ARGV[7]  only for a click that is also counted in a second layout: the `at` from the first layout. Nothing is
--          counted if the user's last click is newer. For all other clicks, this argument is empty or left out.
--
-- If targets have Bloom filters, the script also needs these keys and arguments (docs/filters.md):
--
-- KEYS[5]  the target's filter, tally:filter:{video:3a2f}:42.
-- KEYS[6]  its config.
-- KEYS[7]  the users who like the target and are not in the filter's bits yet.
-- ARGV[8]  the field `epoch` of tally:filter:epoch, read within the last second. A filter of another epoch
--          is not trusted. Callers that compute no bits leave out this argument and all following arguments.
-- ARGV[9]  a filter size, for which the caller computed the user's bits. Empty if the caller passes no bits.
-- ARGV[10] and so on: the user's bits in a filter of the size ARGV[9].
--
-- Returns { result, at, count }.
--   result  1: the state changed, and the click counts. Publish the event.
--           0: the state was the same before, and nothing was counted. Publish the event, too. If Redis remembers the
--           user's last click, the event repeats the event of that click, which perhaps was never published. If
--           the script took the state from ARGV[6], the row in MySQL can be outdated. Then the event corrects the row.
--           -1: unknown, nothing was counted. Ask MySQL whether the user likes the target, and call again with the
--           answer. If the target has a filter of another size than ARGV[9], the script also returns two numbers
--           after the -1: the filter's `size` and `hashIterations`. If the caller can compute the user's bits, it
--           calls again with the bits before it asks MySQL. This caller asks MySQL only if the second call also
--           returns -1.
--   at      this server's clock in microseconds since the epoch as text. The event must contain it as `at`. This time
--           is at least one microsecond later than the user's last click or row. If the result is 0 and Redis
--           remembers the user's last click, the script returns the `at` of that click instead.
--   count   the target's number after the click. nil if it is unknown, because Redis has lost the bucket (it has no
--           field `_`) or is still loading it. The click counts nevertheless.
--
-- If the field is not a list of numbers, the script fails and changes nothing.
--
-- If a caller knows that the click changes the state, it can pass only one key (KEYS[1]) and three arguments (ARGV[1]
-- to ARGV[3]). The script then counts without a check.
--
-- A bucket's field holds a target's numbers as text, in the order of the metrics' codes: `12,3,0,4`. Trailing zeros are
-- left out. A target whose numbers are all zero has no field.
--
-- A click is remembered as its `at`, followed by "+" for a like or "-" for an unlike. The script stores clicks in two
-- hashes in turn. So each hash exists at least ARGV[5] seconds and at most twice as long. Several requests can publish
-- the same event. Then a second field of the hash stores the number of these requests minus one. The name of this field
-- consists of the target, the user and the `at`.

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

local deltas = { like = 1, unlike = -1 }
local delta = deltas[ARGV[3]]
if not delta then
    return redis.error_reply('ERR like.lua: ARGV[3] is neither "like" nor "unlike"')
end
local id, place, bucket = ARGV[1], tonumber(ARGV[2]), KEYS[1]
local field = string.match(ARGV[2], '^entity:(.+)$')
local values, loaded = {}, nil
if place then
    local found = redis.call('HMGET', bucket, id, '_')
    loaded = found[2]
    values = read(found[1])
    if not values then
        return redis.error_reply('ERR like.lua: ' .. KEYS[1] .. ' holds no numbers of ' .. id)
    end
    for missing = #values + 1, place do
        values[missing] = 0
    end
else
    place, bucket = 1, KEYS[4]
    loaded = bucket and redis.call('HGET', bucket, '_')
    local found
    if field then
        found = redis.call('HGET', KEYS[1], field)
    else
        found = redis.call('GET', KEYS[1])
    end
    -- The script accepts only texts that INCRBY and HINCRBY accept. If these commands failed later, the script would
    -- have remembered a click that was never counted.
    if found and found ~= '0' and (#found > 18 or not string.match(found, '^%-?[1-9]%d*$')) then
        return redis.error_reply('ERR like.lua: ' .. KEYS[1] .. ' holds no number')
    end
    values[1] = tonumber(found or 0)
end
loaded = loaded and string.sub(loaded, 1, 1) ~= '~'

-- The target's filter. A filter of another epoch is not trusted, because a failover may have lost likes. The script
-- also does not trust a filter if Redis evicted a part of the filter. Then the string of the filter is too short, or
-- the set KEYS[7] has fewer members than `waiting` says.
local filter
if KEYS[5] then
    local config = redis.call('HMGET', KEYS[6], 'size', 'hashIterations', 'building', 'waiting', 'epoch')
    if config[1] or config[3] then
        filter = { size = config[1], iterations = config[2], building = config[3] }
        filter.is_whole = filter.size
            and config[5] == ARGV[8]
            and redis.call('STRLEN', KEYS[5]) == math.ceil(filter.size / 8)
            and redis.call('SCARD', KEYS[7]) >= tonumber(config[4] or 0)
        filter.fits = filter.is_whole and filter.size == ARGV[9] and #ARGV - 9 == tonumber(filter.iterations)
    end
end

-- Sets the user's bits in the filter, or notes the user beside the filter. The function is called even if nothing is
-- counted, because the event is published.
local function note_liker()
    if filter.fits then
        for index = 10, #ARGV do
            redis.call('SETBIT', KEYS[5], ARGV[index], 1)
        end
    end
    -- While a run builds a new filter, the script also adds the user to the set KEYS[7]. The run may have read MySQL
    -- before MySQL received the like, so the new filter may lack the user.
    if not filter.fits or filter.building then
        redis.call('HINCRBY', KEYS[6], 'waiting', redis.call('SADD', KEYS[7], ARGV[4]))
        redis.call('PERSIST', KEYS[7])
    end
end

local time = redis.call('TIME')
local at = time[1] * 1000000 + time[2]
if ARGV[7] and ARGV[7] ~= '' then
    at = tonumber(ARGV[7])
end
if KEYS[2] then
    local click, sign = id .. ':' .. ARGV[4], delta == 1 and '+' or '-'
    local lately = redis.call('HMGET', KEYS[2], click, '_')
    local last = lately[1] or redis.call('HGET', KEYS[3], click)
    local known = last and string.sub(last, -1)
    if not known and ARGV[6] == '' and filter and filter.is_whole then
        if not filter.fits then
            return { -1, tonumber(filter.size), tonumber(filter.iterations) }
        end
        if redis.call('SISMEMBER', KEYS[7], ARGV[4]) == 0 then
            for index = 10, #ARGV do
                if redis.call('GETBIT', KEYS[5], ARGV[index]) == 0 then
                    known = '-'
                    break
                end
            end
        end
    end
    if not known then
        if ARGV[6] == '' then
            return { -1 }
        end
        local since
        since, known = string.match(ARGV[6], '^(%d+)([+-])$')
        if not since then
            return redis.error_reply('ERR like.lua: ARGV[6] is no row of MySQL, such as 1764000000000000+')
        end
        -- MySQL would ignore an event that is older than the row.
        at = math.max(at, since + 1)
    end
    if filter and delta == 1 then
        note_liker()
    end
    if last then
        local last_at = string.sub(last, 1, -2)
        if known == sign then
            -- Another request publishes the same event. take_back.lua changes nothing until all these requests have
            -- failed.
            local key, others = lately[1] and KEYS[2] or KEYS[3], click .. ':' .. last_at
            redis.call('HSET', key, others, (redis.call('HGET', key, others) or 0) + 1)
        end
        if known == sign or ARGV[7] and ARGV[7] ~= '' and tonumber(last_at) > at then
            return { 0, last_at, loaded and values[place] }
        end
        at = math.max(at, tonumber(last_at) + 1)
    end
    local age = lately[2] and time[1] - lately[2]
    -- A negative age means that the clock went back. Without this check, the hash would grow until the clock has caught
    -- up.
    if age and (age >= tonumber(ARGV[5]) or age < 0) then
        -- The old hash is unlinked first, because RENAME would free a large hash in one step.
        redis.call('UNLINK', KEYS[3])
        redis.call('RENAME', KEYS[2], KEYS[3])
        lately[2] = false
    end
    local text = string.format('%.0f', at)
    redis.call('HSET', KEYS[2], click, text .. sign)
    if not lately[2] then
        redis.call('HSET', KEYS[2], '_', time[1])
        redis.call('EXPIRE', KEYS[2], 3 * ARGV[5])
    end
    if known == sign then
        -- Nothing was counted, so there is nothing to take back.
        redis.call('HSET', KEYS[2], click .. ':' .. text, 1)
        return { 0, text, loaded and values[place] }
    end
end

if filter and delta == 1 then
    redis.call('HINCRBY', KEYS[6], 'inserted', 1)
end

if bucket ~= KEYS[1] then
    local count
    if field then
        count = redis.call('HINCRBY', KEYS[1], field, delta)
    else
        count = redis.call('INCRBY', KEYS[1], delta)
    end
    return { 1, string.format('%.0f', at), loaded and count }
end
values[place] = values[place] + delta
local count = values[place]
local filled = #values
while filled > 0 and values[filled] == 0 do
    filled = filled - 1
end
if filled == 0 then
    redis.call('HDEL', bucket, id)
else
    for index = 1, filled do
        values[index] = string.format('%.0f', values[index])
    end
    redis.call('HSET', bucket, id, table.concat(values, ',', 1, filled))
end
return { 1, string.format('%.0f', at), loaded and count }

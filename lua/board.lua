-- Adds amounts to a member of a board, in all current zsets of the board. The new score also decides the order of
-- members with equal numbers.
--
-- KEYS     the zsets of the current periods, for instance tally:board:{likes}:2026-11-21, tally:board:{likes}:2026-W47,
--          tally:board:{likes}:total. The name in braces is the Cluster's hash tag, so that all these keys are
--          in one slot.
-- ARGV[1]  the member.
-- ARGV[2]  the amount to add to its primary number.
-- ARGV[3]  the amount to add to its second number; 0 if the board has no second number.
-- ARGV[4]  "plain", "second" or "earliest": what decides between members whose primary numbers are equal.
-- ARGV     from ARGV[5] on: three numbers for each key, in the order of KEYS.
--          The first number is the number of bits that low (see below) occupies in a score.
--          The second number is for "earliest": the instant at which the remaining time is zero, in seconds since the
--          epoch. If ARGV[4] is not "earliest", it is 0.
--          The third number is the length of one time step, in seconds.
--
-- The daemon adds to many members with one call. It can send an addition several times, but the addition must count
-- only once. So the daemon appends a key to KEYS, tally:board:{likes}:added, and leaves ARGV[1], ARGV[2] and ARGV[3]
-- empty. It appends to ARGV:
--
--   "once"
--   a partition.
--   the previous addition to the board: the number of its outbox row, ":" and its place in the row. This argument is
--   empty if there is no previous addition.
--   then five arguments for each addition, in order: its row number, its place in the row, the member, the amount to
--   add to the primary number, and the amount to add to the second number.
--
-- The script skips additions that were already made. It returns a list of the errors of the additions that failed. If
-- the previous addition is missing, the script does nothing and returns -1.
--
-- A score is primary * 2^bits + low, below 2^53, so that a double holds it exactly. For "second", low is the second
-- number. For "earliest", the part `low` is the time that remains, counted in steps. The script computes this time
-- whenever the primary number changes. So if two members have equal primary numbers, the member who reached this number
-- first is ahead. A "plain" score is the sum of the amounts.
--
-- Returns the member's new score in each zset, as text. If the score falls to zero or below, the script removes the
-- member and returns zero. For "second", neither number falls below zero, and a member is removed when both are zero.
-- For "earliest", a member is removed when its primary number is zero. If a number doesn't fit into its bits, the
-- script changes no zset and fails with an error that names the key and the member.
--
-- If the archiver has frozen a period and moved its zset to another key, this script creates a new zset for late
-- members. The archiver later merges the late members into the frozen zset.

local kind, zsets = ARGV[4], #KEYS
local now = kind == 'earliest' and tonumber(redis.call('TIME')[1])

-- Adds to a member if a score is the sum of the amounts.
local function add_plain(member, delta)
    local scores = {}
    for index = 1, zsets do
        local score = redis.pcall('ZINCRBY', KEYS[index], delta, member)
        if type(score) == 'table' then
            return score
        end
        if tonumber(score) <= 0 then
            redis.call('ZREM', KEYS[index], member)
            score = '0'
        end
        scores[index] = score
    end
    return scores
end

-- Adds to a member if a score contains two numbers.
local function add_packed(member, primary_delta, low_delta)
    if primary_delta ~= math.floor(primary_delta) or low_delta ~= math.floor(low_delta) then
        return redis.error_reply('ERR board.lua: ARGV[2] and ARGV[3] must be whole numbers where a score holds two')
    end
    local scores = {}
    for index = 1, zsets do
        local at = 5 + 3 * (index - 1)
        local low_end = 2 ^ tonumber(ARGV[at])
        local held = redis.pcall('ZSCORE', KEYS[index], member)
        if type(held) == 'table' then
            return held
        end
        local score = tonumber(held or '0')
        if score < 0 or score ~= math.floor(score) or (kind == 'earliest' and score > 0 and score < low_end) then
            return redis.error_reply('ERR board.lua: the score of ' .. member .. ' in ' .. KEYS[index]
                .. ' was not made by this tie')
        end
        local primary, low = math.floor(score / low_end), score % low_end
        primary = math.max(0, primary + primary_delta)
        if kind == 'second' then
            low = math.max(0, low + low_delta)
        elseif primary == 0 then
            low = 0
        elseif primary_delta ~= 0 then
            low = math.floor((tonumber(ARGV[at + 1]) - now) / tonumber(ARGV[at + 2]))
            -- A late member has no remaining time.
            low = math.min(math.max(0, low), low_end - 1)
        end
        if low >= low_end or primary >= 2 ^ 53 / low_end then
            local what = low >= low_end and 'second' or 'primary'
            return redis.error_reply('ERR board.lua: the ' .. what .. ' number of ' .. member .. ' in ' .. KEYS[index]
                .. ' no longer fits into its score')
        end
        scores[index] = string.format('%.0f', primary * low_end + low)
    end
    for index = 1, zsets do
        if scores[index] == '0' then
            redis.call('ZREM', KEYS[index], member)
        else
            redis.call('ZADD', KEYS[index], scores[index], member)
        end
    end
    return scores
end

-- Returns the new scores, or an error.
local function add(member, delta, low_delta)
    if kind == 'plain' or not kind then
        return add_plain(member, delta)
    end
    if kind ~= 'second' and kind ~= 'earliest' then
        return redis.error_reply('ERR board.lua: ARGV[4] is none of "plain", "second" and "earliest"')
    end
    return add_packed(member, tonumber(delta), tonumber(low_delta))
end

local once = 5 + 3 * (#KEYS - 1)
if ARGV[once] ~= 'once' then
    return add(ARGV[1], ARGV[2], ARGV[3])
end
zsets = #KEYS - 1
local partition = ARGV[once + 1]
local function parse(mark)
    local number, place = string.match(mark, '^(%d+):(%d+)$')
    return tonumber(number), tonumber(place)
end
local number, place = parse(redis.call('HGET', KEYS[#KEYS], partition) or '0:0')
local function is_added(of_row, at)
    return of_row < number or (of_row == number and at <= place)
end
if ARGV[once + 2] ~= '' and not is_added(parse(ARGV[once + 2])) then
    return -1
end
if is_added(tonumber(ARGV[#ARGV - 4]), tonumber(ARGV[#ARGV - 3])) then
    return {}
end
-- The mark is written first: if memory is full, Redis refuses this write, and nothing changes.
redis.call('HSET', KEYS[#KEYS], partition, ARGV[#ARGV - 4] .. ':' .. ARGV[#ARGV - 3])
local errors = {}
for at = once + 3, #ARGV, 5 do
    if not is_added(tonumber(ARGV[at]), tonumber(ARGV[at + 1])) then
        local answer = add(ARGV[at + 2], ARGV[at + 3], ARGV[at + 4])
        errors[#errors + 1] = answer.err
    end
end
return errors

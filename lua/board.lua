-- Adds to a member of a board, in all of the board's current zsets at once, and keeps the order right among equals.
--
-- KEYS     the zsets of the periods that now lies in, for instance tally:board:{likes}:2026-11-21, tally:board:{likes}:2026-W47,
--          tally:board:{likes}:total. The name in braces is the Cluster's hash tag, so that all of them are in one slot.
-- ARGV[1]  the member
-- ARGV[2]  what is added to its primary number
-- ARGV[3]  what is added to its second number; 0 where the board has none
-- ARGV[4]  "plain", "second" or "earliest": what decides between members whose primary numbers are equal
-- ARGV     then for each key two numbers: how many bits of the score the second number has; and, for "earliest", the
--          instant at which the time runs out, in seconds since the epoch, else 0; and the length of its steps in seconds
--
-- For what the daemon adds once, whatever it has to send again, also: KEYS has one more at the end, tally:board:{likes}:added, and ARGV five more: "once", a
-- partition, the number and place of what is added in its outbox, and number:place of what was sent before it, or nothing. What comes again, or is before
-- the last one, is left out: an empty list is returned then; and -1 where what was sent before it is missing, and nothing is done.
--
-- A score is primary * 2^bits + low, below 2^53, so that a double holds it exactly. low is the second number; or, for
-- "earliest", the steps that are left until the time runs out, as of when the primary number was last changed, so that
-- of two equals the one who got there first is ahead. "plain" scores are what was added, of any kind.
--
-- Returns the member's new score in each zset, as text. A member whose score falls to zero or below is removed, and its
-- score is zero. Of "second" neither number falls below zero, and a member stays while it has one of them; of "earliest"
-- it goes with its primary number. What doesn't fit is an error, which names the key and the member, and then nothing is
-- changed in any zset.
--
-- A zset that the archiver has taken away meanwhile is made anew by this: what comes late is merged into the frozen one.

local member, kind = ARGV[1], ARGV[4]
local scores, zsets = {}, #KEYS
if #ARGV > 11 and ARGV[#ARGV - 4] == 'once' then
    zsets = #KEYS - 1
    local partition, after = ARGV[#ARGV - 3], ARGV[#ARGV]
    local mark = ARGV[#ARGV - 2] .. ':' .. ARGV[#ARGV - 1]
    local kept = redis.call('HGET', KEYS[#KEYS], partition) or '0:0'
    local function is_before(one, other)
        local number, place = string.match(one, '^(%d+):(%d+)$')
        local last, at = string.match(other, '^(%d+):(%d+)$')
        number, last = tonumber(number), tonumber(last)
        return number < last or (number == last and tonumber(place) < tonumber(at))
    end
    if not is_before(kept, mark) then
        return {}
    end
    if after ~= '' and is_before(kept, after) then
        return -1
    end
    redis.call('HSET', KEYS[#KEYS], partition, mark)
end
if kind == 'plain' or not kind then
    for index = 1, zsets do
        local score = redis.call('ZINCRBY', KEYS[index], ARGV[2], member)
        if tonumber(score) <= 0 then
            redis.call('ZREM', KEYS[index], member)
            score = '0'
        end
        scores[index] = score
    end
    return scores
end

if kind ~= 'second' and kind ~= 'earliest' then
    return redis.error_reply('ERR board.lua: ARGV[4] is none of "plain", "second" and "earliest"')
end
local primary_delta, low_delta = tonumber(ARGV[2]), tonumber(ARGV[3])
if primary_delta ~= math.floor(primary_delta) or low_delta ~= math.floor(low_delta) then
    return redis.error_reply('ERR board.lua: ARGV[2] and ARGV[3] must be whole numbers where a score holds two')
end
local now = tonumber(redis.call('TIME')[1])
for index = 1, zsets do
    local at = 5 + 3 * (index - 1)
    local low_end = 2 ^ tonumber(ARGV[at])
    local score = tonumber(redis.call('ZSCORE', KEYS[index], member) or '0')
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
        -- What comes late has no time left.
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

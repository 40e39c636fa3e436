-- Moves one page of members from one zset to another. If a member is in both zsets, the sum of its two scores remains.
-- The daemon calls the script in two cases. After a period was frozen, the script moves late members (written after the
-- freeze) into the frozen zset. After Redis lost a board, the script moves the members that were written since the loss
-- into the restored zset. The restored zset then becomes the live zset.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the live zset. If KEYS[3] is the frozen zset, the live zset contains the late members. If KEYS[3] is the
--          restored zset, the live zset contains the members that were written since the loss.
-- KEYS[3]  the frozen zset, or the restored zset.
-- KEYS[4]  for a restored zset: the mark of the board's snapshot. The script deletes this mark before it
--          moves members. When the restored zset becomes the live zset, the script sets a new mark.
--          If KEYS[3] is the frozen zset, KEYS[4] is the hash with the board's freeze notes.
-- ARGV[1]  the claim of this run.
-- ARGV[2]  the maximum number of members to move.
-- ARGV[3]  "plain", "second" or "earliest", as in board.lua.
-- ARGV[4]  the number of bits of the second number in a score.
-- ARGV[5]  for a restored zset: its new mark. For a frozen zset: a field in KEYS[4]. The script counts the moved
--          members in this field.
--
-- Returns  n  the number of moved members.
--         -1  another run has the claim.
--         -2  there is no frozen zset. Nothing is moved, because the late members are only a part of the board.
--       -4-n  n members were moved, no members remain, and the restored zset is now the live zset.
--
-- The same script adds a member to one zset and removes it from the other. So each score is added once, even if the
-- script runs several times or late. If a member's scores do not add up, the member stays in the live zset. If the page
-- has only such members, the script fails with an error that names a key and a member.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 0 then
    return -2
end
local restored = tonumber(ARGV[5])
-- The moved members will exist only in this zset, so the zset must not expire. If memory is full, Redis allows the
-- later writes only after this one.
redis.call('PERSIST', KEYS[3])
if restored then
    redis.call('UNLINK', KEYS[4])
end
local page = redis.call('ZRANGE', KEYS[2], 0, ARGV[2] - 1, 'WITHSCORES')
local low_end = 2 ^ tonumber(ARGV[4] or '0')

-- Returns the sum of two packed scores, or why there is none.
local function sum(member, known, late)
    if late < 0 or late ~= math.floor(late) or known ~= math.floor(known)
        or (ARGV[3] == 'earliest' and (late < low_end or (known > 0 and known < low_end))) then
        return nil, 'ERR board_merge.lua: the score of ' .. member .. ' in ' .. KEYS[2] .. ' or ' .. KEYS[3]
            .. ' was not made by the board\'s tie'
    end
    local primary = math.floor(known / low_end) + math.floor(late / low_end)
    local low = late % low_end
    if ARGV[3] == 'second' then
        low = low + known % low_end
    end
    -- With "earliest", the low part of a score says when the member's primary number last changed. The late
    -- addition was the last change. So the new score keeps the low part that the score has in the live zset.
    if low >= low_end or primary >= 2 ^ 53 / low_end then
        return nil, 'ERR board_merge.lua: the score of ' .. member .. ' in ' .. KEYS[3] .. ' no longer holds what came late'
    end
    return string.format('%.0f', primary * low_end + low)
end

local packed = ARGV[3] == 'second' or ARGV[3] == 'earliest'
local moved, problem = 0, nil
for index = 1, #page, 2 do
    local member, score, why = page[index], page[index + 1], nil
    if packed then
        local known = tonumber(redis.call('ZSCORE', KEYS[3], member) or '0')
        score, why = sum(member, known, tonumber(score))
    end
    local added = score and redis.pcall(packed and 'ZADD' or 'ZINCRBY', KEYS[3], score, member) or { err = why }
    if type(added) == 'table' then
        problem = problem or added.err
    else
        redis.call('ZREM', KEYS[2], member)
        moved = moved + 1
    end
end
if moved == 0 and problem then
    return redis.error_reply(problem)
end
if restored and redis.call('EXISTS', KEYS[2]) == 0 then
    redis.call('RENAME', KEYS[3], KEYS[2])
    redis.call('SET', KEYS[4], ARGV[5])
    return -4 - moved
end
if not restored and moved > 0 then
    -- The script counts the moved members. If MySQL goes back to an older state, this count shows that MySQL lacks
    -- these members.
    local before = tonumber(redis.call('HGET', KEYS[4], ARGV[5]) or '0')
    redis.call('HSET', KEYS[4], ARGV[5], string.format('%.0f', before + moved))
end
return moved

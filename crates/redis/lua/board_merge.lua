-- Moves one page of what was written to a closed period after it was frozen into the frozen zset, by adding; or of what was
-- written to a board since Redis lost it into the one that is restored, which takes the live one's place in the end.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the live zset, made anew by what came late, or since
-- KEYS[3]  the frozen zset, or the restored one
-- KEYS[4]  of a restored one, the mark of its snapshot: gone from the first page on, until the restored zset is the live one;
--          of a frozen one, the notes of which periods were frozen
-- ARGV[1]  the claim of the run that does it
-- ARGV[2]  how many members at most
-- ARGV[3]  "plain", "second" or "earliest", as in board.lua
-- ARGV[4]  how many bits of the score the second number has
-- ARGV[5]  of a restored one, the number that the mark gets; of a frozen one, the field of the notes that counts the members moved
--
-- Returns how many were moved; -1 where the claim is not this run's (any more); -2 where there is no frozen zset: then
-- nothing moves, because what came late alone is no board; -4 and less, by how many were moved, where nothing is left and the restored
-- zset is the live one.
--
-- Each member is added and removed in one piece, so however often and late this runs, each score is added once. What
-- doesn't fit is an error, which names the key and the member; what was moved before it stays moved.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 0 then
    return -2
end
local restored = tonumber(ARGV[5])
if restored then
    -- From now on it alone has what is moved.
    redis.call('PERSIST', KEYS[3])
    redis.call('UNLINK', KEYS[4])
end
local page = redis.call('ZRANGE', KEYS[2], 0, ARGV[2] - 1, 'WITHSCORES')
local low_end = 2 ^ tonumber(ARGV[4] or '0')
for index = 1, #page, 2 do
    local member, late = page[index], page[index + 1]
    if ARGV[3] == 'second' or ARGV[3] == 'earliest' then
        local known = tonumber(redis.call('ZSCORE', KEYS[3], member) or '0')
        late = tonumber(late)
        if late < 0 or late ~= math.floor(late) or known ~= math.floor(known)
            or (ARGV[3] == 'earliest' and (late < low_end or (known > 0 and known < low_end))) then
            return redis.error_reply('ERR board_merge.lua: the score of ' .. member .. ' in ' .. KEYS[2] .. ' or ' .. KEYS[3]
                .. ' was not made by the board\'s tie')
        end
        local primary = math.floor(known / low_end) + math.floor(late / low_end)
        local low = late % low_end
        if ARGV[3] == 'second' then
            low = low + known % low_end
        end
        -- "earliest": it got there with what came late.
        if low >= low_end or primary >= 2 ^ 53 / low_end then
            return redis.error_reply('ERR board_merge.lua: the score of ' .. member .. ' in ' .. KEYS[3]
                .. ' no longer holds what came late')
        end
        redis.call('ZADD', KEYS[3], string.format('%.0f', primary * low_end + low), member)
    else
        redis.call('ZINCRBY', KEYS[3], late, member)
    end
    redis.call('ZREM', KEYS[2], member)
end
if restored and redis.call('EXISTS', KEYS[2]) == 0 then
    redis.call('RENAME', KEYS[3], KEYS[2])
    redis.call('SET', KEYS[4], ARGV[5])
    return -4 - #page / 2
end
if not restored and #page > 0 then
    -- With the zset, so that a MySQL that went back is seen to lack what was moved.
    local moved = tonumber(redis.call('HGET', KEYS[4], ARGV[5]) or '0')
    redis.call('HSET', KEYS[4], ARGV[5], string.format('%.0f', moved + #page / 2))
end
return #page / 2

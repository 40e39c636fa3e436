-- Reads a part of a board, in rank order, at one instant.
--
-- KEYS[1]  the zset.
-- ARGV[1]  "page" or "around".
-- ARGV[2]  page: how many members to skip; around: the member.
-- ARGV[3]  page: how many members to read; around: how many members to read before and after this member.
--
-- Returns { members, before, higher, member, score, member, score, ... }.
--   members  the number of members of the zset.
--   before   how many members are before the first returned member.
--   higher   how many of these members have a higher score than the first returned member.
--   Then the members follow, highest score first. If two scores are equal, the greater member is first.
-- Returns an empty list if the board doesn't have the member.

local count, from, last = redis.call('ZCARD', KEYS[1]), 0, 0
-- If the caller passes a negative number, the script uses zero, because a negative number would count from the last
-- member. If the count is larger than the number of members, the script uses the number of members.
local wanted = math.min(math.max(0, tonumber(ARGV[3])), count)
if ARGV[1] == 'around' then
    local rank = redis.call('ZREVRANK', KEYS[1], ARGV[2])
    if not rank then
        return {}
    end
    from, last = math.max(0, rank - wanted), rank + wanted
else
    from = math.min(math.max(0, tonumber(ARGV[2])), count)
    last = from + wanted - 1
    if wanted == 0 then
        return { count, from, 0 }
    end
end
local page = redis.call('ZRANGE', KEYS[1], from, last, 'REV', 'WITHSCORES')
local higher = 0
if page[2] then
    higher = redis.call('ZCOUNT', KEYS[1], '(' .. page[2], '+inf')
end
table.insert(page, 1, higher)
table.insert(page, 1, from)
table.insert(page, 1, count)
return page

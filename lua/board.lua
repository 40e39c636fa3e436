-- Adds to a member of a board, in all of the board's current zsets at once.
--
-- KEYS     the zsets of the periods that now lies in, for instance board:{likes}:2026-11-21, board:{likes}:2026-W47.
--          The name in braces is the Cluster's hash tag, so that all of them are in one slot.
-- ARGV[1]  the member
-- ARGV[2]  what is added to its score
--
-- Returns the member's new score in each zset, as text. A member whose score falls to zero or below is removed, and its
-- score is zero.
--
-- A zset that the archiver has taken away meanwhile is made anew by this: what comes late is merged into the frozen one.

local scores = {}
for index = 1, #KEYS do
    local score = redis.call('ZINCRBY', KEYS[index], ARGV[2], ARGV[1])
    if tonumber(score) <= 0 then
        redis.call('ZREM', KEYS[index], ARGV[1])
        score = '0'
    end
    scores[index] = score
end
return scores

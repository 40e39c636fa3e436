-- Marks a board with the number of a snapshot, or removes the mark. If a later run does not find the mark, Redis has
-- lost the board.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the mark.
-- KEYS[3]  the live zset.
-- KEYS[4]  only if board_raise.lua has raised the scores in the live zset: the count of pages that this server received.
-- ARGV[1]  the claim of this run.
-- ARGV[2]  the expected mark, or an empty text if no mark is expected.
-- ARGV[3]  the new mark, or an empty text to remove the mark.
-- ARGV[4]  the total number of pages, if KEYS[4] is set.
--
-- Returns  1  the mark was changed.
--         -1  another run has the claim.
--         -2  there is neither a mark nor a board.
--         -3  the mark is not the expected mark, or pages are missing, because another Redis server has taken over.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] or (KEYS[4] and redis.call('GET', KEYS[4]) ~= ARGV[4]) then
    return -3
end
if ARGV[3] == '' then
    redis.call('UNLINK', KEYS[2])
    return 1
end
if ARGV[2] == '' and redis.call('EXISTS', KEYS[3]) == 0 then
    return -2
end
-- If a client has set an expiry, Redis would delete the board before it is archived.
redis.call('PERSIST', KEYS[3])
redis.call('SET', KEYS[2], ARGV[3])
return 1

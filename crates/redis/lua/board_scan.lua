-- Reads a part of a board for a snapshot, unless Redis has lost the board since the snapshot began.
--
-- KEYS[1]  the snapshot's mark: the number of the run that began the snapshot.
-- KEYS[2]  the live zset.
-- KEYS[3]  the frozen zset.
-- ARGV[1]  the number of the run.
-- ARGV[2]  the minimum number of members that the zset must have.
-- ARGV[3]  "scan" or "have".
-- ARGV     for scan: a cursor (0 at the start), and the approximate number of members to read. For have: members.
--
-- Returns  scan: { the next cursor, 0 at the end, { member, score, member, score, ... } }. A member that exists during
--          the whole scan is returned at least once.
--          have: each member's score, or nil.
--         -1  the mark is not the number of this run: Redis has lost the board since the snapshot began.
--         -2  the board is frozen.
--         -3  the board has too few members: it was evicted or deleted.
--
-- The check and the read are one atomic step.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[3]) == 1 then
    return -2
end
if redis.call('ZCARD', KEYS[2]) < tonumber(ARGV[2]) then
    return -3
end
if ARGV[3] == 'scan' then
    return redis.call('ZSCAN', KEYS[2], ARGV[4], 'COUNT', ARGV[5])
end
return redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 4))

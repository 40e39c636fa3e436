-- Reads some of a board for its snapshot, if the board is still the one that the snapshot is about.
--
-- KEYS[1]  the snapshot's mark: the number of the run that began it
-- KEYS[2]  the live zset
-- KEYS[3]  the frozen zset
-- ARGV[1]  the number of the run
-- ARGV[2]  how many members the zset must have at least
-- ARGV[3]  "scan" or "have"
-- ARGV     scan: a cursor, 0 to begin with, and about how many members; have: members
--
-- Returns for scan { the next cursor, 0 at the end, { member, score, member, score, ... } }, each member that is there all the time at
-- least once; for have each member's score, or nil. -1 where the mark is another one or gone: Redis has lost the board since; -2 where
-- the board is frozen; -3 where it has too few members: it was evicted, or deleted. What is returned was read while that held.

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

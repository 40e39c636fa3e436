-- Ends a frozen zset whose archive has been verified and whose time has come.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the live zset
-- KEYS[3]  the frozen zset
-- ARGV[1]  the claim of the run that does it
--
-- Returns 1 where it did, or nothing was left to do; 0 where something came late at the last moment: then the frozen
-- zset stays, to be merged into; -1 where the claim is not this run's (any more).
--
-- UNLINK, because DEL and expiring free a large zset at once, and every other client waits meanwhile.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[2]) == 1 then
    return 0
end
redis.call('UNLINK', KEYS[3])
return 1

-- Deletes a frozen zset after its archive was verified and its time has come.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the live zset
-- KEYS[3]  the frozen zset
-- ARGV[1]  the claim of this run
--
-- Returns  1  it was deleted, or there was none
--          0  late members arrived at the last moment: the frozen zset stays, and they are merged into it
--         -1  another run has the claim
--
-- It uses UNLINK. DEL and expiry free a large zset in one step, and every other client waits meanwhile.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[2]) == 1 then
    return 0
end
redis.call('UNLINK', KEYS[3])
return 1

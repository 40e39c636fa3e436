-- Deletes a frozen zset. The daemon calls the script when the archive is verified and the zset is due.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the live zset.
-- KEYS[3]  the frozen zset.
-- ARGV[1]  the claim of this run.
--
-- Returns  1  the frozen zset was deleted, or did not exist.
--          0  the frozen zset stays, because late members have arrived. The caller must first merge these members
--             into the frozen zset.
--         -1  another run has the claim.
--
-- The script uses UNLINK, because DEL and expiry free a large zset in one step, and all other clients wait for this
-- step (decision 0052).

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return -1
end
if redis.call('EXISTS', KEYS[2]) == 1 then
    return 0
end
redis.call('UNLINK', KEYS[3])
return 1

-- Says that a target's filter is being built: from now on everybody who likes the target is also noted beside it.
--
-- KEYS[1]  the filter's config
-- KEYS[2]  where the new one is built
-- ARGV[1]  the number of the run that builds it
--
-- Returns 1; 0 where a later run has begun, and this one is over.

if tonumber(redis.call('HGET', KEYS[1], 'building') or 0) > tonumber(ARGV[1]) then
    return 0
end
redis.call('UNLINK', KEYS[2])
redis.call('HSET', KEYS[1], 'building', ARGV[1])
return 1

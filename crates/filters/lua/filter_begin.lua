-- Marks a target's filter as being built. After this call, every user who likes the target is also recorded in a set
-- beside the filter.
--
-- KEYS[1]  the filter's config.
-- KEYS[2]  the key of the new filter.
-- ARGV[1]  the number of the run that builds the new filter.
--
-- Returns 1. Returns 0 if a later run has begun: then this run is outdated.

if tonumber(redis.call('HGET', KEYS[1], 'building') or 0) > tonumber(ARGV[1]) then
    return 0
end
redis.call('UNLINK', KEYS[2])
redis.call('HSET', KEYS[1], 'building', ARGV[1])
return 1

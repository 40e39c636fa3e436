-- Replaces a filter with the newly built one.
--
-- KEYS[1]  the filter.
-- KEYS[2]  its config: the fields of Redisson, and further fields of tallyd.
-- KEYS[3]  the users who like the target and are not in the filter's bits yet.
-- KEYS[4]  the key of the new filter.
-- ARGV[1]  the number of the run that built the new filter.
-- ARGV[2] to ARGV[5]  size, hashIterations, expectedInsertions and falseProbability, as Redisson writes them.
-- ARGV[6]  the number of users in the new filter.
-- ARGV[7]  the epoch in which the filter was built: the number of the run that began the epoch.
-- ARGV[8]  the number of users whom the build added because of clicks that Redis remembered. ARGV[6] may also contain
--          some of these users.
--
-- Returns 1. Returns 0 and changes nothing if another run builds the filter, or if Redis has lost a part of the new
-- filter. Users who were noted during the build stay noted, because the new filter may lack these users.

if
    redis.call('HGET', KEYS[2], 'building') ~= ARGV[1]
    or redis.call('STRLEN', KEYS[4]) ~= math.ceil(ARGV[2] / 8)
    or redis.call('SCARD', KEYS[3]) < tonumber(redis.call('HGET', KEYS[2], 'waiting') or 0)
then
    return 0
end
-- The script first unlinks the old filter, because RENAME would free a large filter in one step.
redis.call('UNLINK', KEYS[1])
redis.call('RENAME', KEYS[4], KEYS[1])
redis.call('PERSIST', KEYS[1])
redis.call(
    'HSET', KEYS[2],
    'size', ARGV[2], 'hashIterations', ARGV[3], 'expectedInsertions', ARGV[4], 'falseProbability', ARGV[5],
    'inserted', string.format('%.0f', ARGV[6] + redis.call('SCARD', KEYS[3])), 'epoch', ARGV[7], 'others', ARGV[8]
)
redis.call('HDEL', KEYS[2], 'building')
return 1

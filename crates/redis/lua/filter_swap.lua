-- Puts the filter that was built in the place of the former one.
--
-- KEYS[1]  the filter
-- KEYS[2]  its config, as Redisson has it, and more fields of ours
-- KEYS[3]  who likes the target and is not in its bits yet
-- KEYS[4]  where the new one was built
-- ARGV[1]  the number of the run that built it
-- ARGV[2]  size, ARGV[3] hashIterations, ARGV[4] expectedInsertions, ARGV[5] falseProbability: as Redisson writes them
-- ARGV[6]  how many users are in it
-- ARGV[7]  since when this Redis is trusted: the number of a run
-- ARGV[8]  how many more may be in it, whom Redis remembered
--
-- Returns 1; 0 where another run builds it, or Redis lost some of it: then nothing is changed. Those who were noted while it was built
-- stay noted: they may not be in it.

if
    redis.call('HGET', KEYS[2], 'building') ~= ARGV[1]
    or redis.call('STRLEN', KEYS[4]) ~= math.ceil(ARGV[2] / 8)
    or redis.call('SCARD', KEYS[3]) < tonumber(redis.call('HGET', KEYS[2], 'waiting') or 0)
then
    return 0
end
-- Not left to RENAME: that would free a large one at once.
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

-- Makes readers trust the filters of one epoch for a limited time (decision 0047). Each run of the filter job renews
-- this time.
--
-- KEYS[1]  tally:filter:epoch.
-- ARGV[1]  the number of this run.
-- ARGV[2]  the epoch.
-- ARGV[3]  for how many seconds readers trust the filters of this epoch.
--
-- Returns 1. Returns 0 if this run is outdated, because a run with a higher number has already called the script.

if tonumber(redis.call('HGET', KEYS[1], 'run') or 0) > tonumber(ARGV[1]) then
    return 0
end
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'epoch', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1

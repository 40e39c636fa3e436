-- Remembers a user's likes and unlikes that a gateway has just published. The script counts nothing. A click replaces a
-- remembered click only if the remembered click is older.
--
-- KEYS[1]  the user's clicks, for instance tally:gw:{7}.
-- ARGV[1]  how many seconds the clicks are remembered after the last click.
-- ARGV[2]  the maximum number of remembered clicks. If Redis already remembers this number of clicks, the script
--          first forgets all of them.
-- ARGV[3], ARGV[4] and so on, two arguments for each click. The first is KIND:TARGET, with the target's id. The second
-- is the click's `at`, followed by "+" for a like or "-" for an unlike.
--
-- Returns 1.

if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[2]) then
    redis.call('UNLINK', KEYS[1])
end
for i = 3, #ARGV, 2 do
    local click, last = ARGV[i + 1], redis.call('HGET', KEYS[1], ARGV[i])
    local at, last_at = tonumber(string.sub(click, 1, -2)), last and tonumber(string.sub(last, 1, -2)) or 0
    -- If both clicks have the same `at`, the unlike wins, as in MySQL.
    if at > last_at or at == last_at and string.sub(click, -1) == '-' then
        redis.call('HSET', KEYS[1], ARGV[i], click)
    end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1

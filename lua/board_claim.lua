-- Lets a run, and no other one from now on, change a board's closed periods.
--
-- KEYS[1]  the board's claim
-- KEYS[2]  the notes of which periods were frozen
-- ARGV[1]  the number of the run
--
-- Returns 1; 0 where the notes are to be begun (board_note.lua): there are none, or the last run was of a version that keeps none. Each run that
-- keeps them has its number in the field "-", too; where Redis goes back in time, both numbers do.

local former, noted = redis.call('GET', KEYS[1]), redis.call('HGET', KEYS[2], '-')
redis.call('SET', KEYS[1], ARGV[1])
if not noted or former ~= noted then
    -- Until then they say nothing.
    redis.call('HDEL', KEYS[2], '-')
    return 0
end
redis.call('HSET', KEYS[2], '-', ARGV[1])
return 1

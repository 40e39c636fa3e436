-- Claims a board for a run. After this call, only this run can change the closed periods of the board.
--
-- KEYS[1]  the board's claim.
-- KEYS[2]  the notes about frozen periods.
-- KEYS     then the live zset of each period that is frozen in MySQL.
-- ARGV[1]  the claim.
-- ARGV[2]  the run's number.
-- ARGV     then for each of these periods: its name, its generation in MySQL, and its note in MySQL.
--
-- Returns the generation of the data in Redis: the number of the first run that claimed the board. The generation is
-- lost if Redis loses its data, and it is an older one if Redis goes back to an older state. If Redis
-- has lost the note about a frozen period, and has no live zset of this period, the script copies the note from MySQL
-- to Redis again. All members that a later call writes to this period are late members.

-- If memory is full, Redis allows a script to write only after a write that frees memory. The archiver needs the claim
-- to free memory.
redis.call('UNLINK', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
local generation = redis.call('HGET', KEYS[2], '-')
if not generation then
    generation = ARGV[2]
    redis.call('HSET', KEYS[2], '-', generation)
end
for index = 3, #KEYS do
    local period, of, note = ARGV[3 * index - 6], ARGV[3 * index - 5], ARGV[3 * index - 4]
    if of == generation and tonumber(redis.call('HGET', KEYS[2], period) or '-1') < tonumber(note)
        and redis.call('EXISTS', KEYS[index]) == 0 then
        redis.call('HSET', KEYS[2], period, note)
    end
end
return generation

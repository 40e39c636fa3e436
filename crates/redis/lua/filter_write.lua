-- Appends a piece to a filter that is being built.
--
-- KEYS[1]  the filter's config
-- KEYS[2]  where the new one is built
-- ARGV[1]  the number of the run that builds it
-- ARGV[2]  how many bytes are there already
-- ARGV[3]  the piece
--
-- Returns 1; 0 where another run builds it, or a piece is missing: it comes twice or late, or Redis lost what was there.

if redis.call('HGET', KEYS[1], 'building') ~= ARGV[1] or redis.call('STRLEN', KEYS[2]) ~= tonumber(ARGV[2]) then
    return 0
end
redis.call('APPEND', KEYS[2], ARGV[3])
-- What nobody finishes goes away.
redis.call('EXPIRE', KEYS[2], 3600)
return 1

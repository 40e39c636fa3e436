-- Appends a piece to a filter that is being built.
--
-- KEYS[1]  the filter's config.
-- KEYS[2]  the key of the new filter.
-- ARGV[1]  the number of the run that builds the filter.
-- ARGV[2]  the number of bytes before this piece.
-- ARGV[3]  the piece.
--
-- Returns 1. Returns 0 if another run builds the filter. Also returns 0 if the filter's length is not ARGV[2], because
-- the call arrived twice or late, or because Redis lost a piece.

if redis.call('HGET', KEYS[1], 'building') ~= ARGV[1] or redis.call('STRLEN', KEYS[2]) ~= tonumber(ARGV[2]) then
    return 0
end
redis.call('APPEND', KEYS[2], ARGV[3])
-- An unfinished filter expires.
redis.call('EXPIRE', KEYS[2], 3600)
return 1

-- Which commands the account may not run. ARGV: a command and its arguments as JSON, one after the other. Runs none of them.
-- Returns the names of those that it may not run, or that the server doesn't know.
local refused = {}
for _, text in ipairs(ARGV) do
  local command = cjson.decode(text)
  local known, may = pcall(redis.acl_check_cmd, unpack(command))
  if not (known and may) then
    refused[#refused + 1] = command[1]
  end
end
return refused

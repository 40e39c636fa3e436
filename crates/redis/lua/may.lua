-- Checks which commands the account is not allowed to run. The script runs none of these commands. ARGV has the
-- commands with their arguments, each as JSON. Returns the names of the commands that the account is not allowed to
-- run, or that the server doesn't have.
local refused = {}
for _, text in ipairs(ARGV) do
  local command = cjson.decode(text)
  local known, may = pcall(redis.acl_check_cmd, unpack(command))
  if not (known and may) then
    refused[#refused + 1] = command[1]
  end
end
return refused

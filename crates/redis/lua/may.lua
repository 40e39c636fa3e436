-- Checks which commands the account must not run. It runs none of the commands. ARGV has the commands with their
-- arguments, each as JSON. Returns the names of the commands that the account must not run, or that the server doesn't
-- know.
local refused = {}
for _, text in ipairs(ARGV) do
  local command = cjson.decode(text)
  local known, may = pcall(redis.acl_check_cmd, unpack(command))
  if not (known and may) then
    refused[#refused + 1] = command[1]
  end
end
return refused

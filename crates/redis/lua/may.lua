-- Checks commands without running them. ARGV contains the commands with their arguments, each as JSON. Returns the
-- names of the commands that the account is not allowed to run, or that the server does not have.
local refused = {}
for _, text in ipairs(ARGV) do
  local command = cjson.decode(text)
  local known, may = pcall(redis.acl_check_cmd, unpack(command))
  if not (known and may) then
    refused[#refused + 1] = command[1]
  end
end
return refused

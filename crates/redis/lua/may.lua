-- Finds commands that the account may not run. ARGV: commands with their arguments, each as JSON. It runs none of them.
-- Returns the names of the commands that the account may not run, or that the server doesn't know.
local refused = {}
for _, text in ipairs(ARGV) do
  local command = cjson.decode(text)
  local known, may = pcall(redis.acl_check_cmd, unpack(command))
  if not (known and may) then
    refused[#refused + 1] = command[1]
  end
end
return refused

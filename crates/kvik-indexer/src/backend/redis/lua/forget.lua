-- Takes blocks away from a source in every tier, however often they were stored.

local source = load_source(ARGV[1])
if not source then return 0 end
read_blocks()
for tier = 0, 3 do
  local holder = source.holders[tier]
  if holder then
    change_blocks(2, #KEYS - 1, false, function(value) return value_without(value, holder, true) end)
  end
end
write_blocks(0)
return 1

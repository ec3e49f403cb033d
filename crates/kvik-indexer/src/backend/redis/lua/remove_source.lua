-- Takes a source out of the register; what it held counts no more.

local source = load_source(ARGV[1])
if not source then return 0 end
drop_holders(source.holders)
drop_holders(source.pending)
redis.call('HDEL', register, 's' .. source.name)
return 1

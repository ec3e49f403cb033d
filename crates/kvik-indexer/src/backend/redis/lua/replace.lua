-- Does a part of a replacement. The new blocks are those of pending holders, which do not count, until the
-- last part makes them the holders of the source. An empty token begins; the answer is the token of the rest.

local name, epoch, next_sequence, first_sequence = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local token, is_last, ttl_s, operations = ARGV[5], ARGV[6] == '1', tonumber(ARGV[7]), ARGV[8]
local DONE, OLD_EPOCH, PART, INTERRUPTED = 1, 2, 3, 4

local source = load_source(name) or new_source(name, first_sequence)
if epoch ~= '' and source.epoch ~= '' and less(epoch, source.epoch) then return { OLD_EPOCH, '' } end

if token == '' then
  drop_holders(source.pending)
  -- All four, so that the token does not change on the way.
  for tier = 0, 3 do source.pending[tier] = open_holder(name, tier, true) end
elseif packed_holders(source.pending) ~= token then
  return { INTERRUPTED, '' }
end

read_blocks()
apply_operations(source, operations, true)
write_blocks(ttl_s)
if not is_last then
  save_source(source, ttl_s)
  return { PART, packed_holders(source.pending) }
end
drop_holders(source.holders)
for tier = 0, 3 do
  redis.call('HSET', register, 'h' .. source.pending[tier], string.char(tier) .. name)
end
source.holders, source.pending = source.pending, {}
if epoch ~= '' then source.epoch = epoch end
source.due, source.gap, source.gap_until, source.n_done = next_sequence, GAP_NONE, ZERO, 0
save_source(source, ttl_s)
return { DONE, '' }

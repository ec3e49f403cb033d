-- Judges a part of a batch and applies it if it is due; the rules are those of the in-memory index.

local APPLIED, RESTARTED, DUPLICATE, GAP, OLD_EPOCH, PART = 1, 2, 3, 4, 5, 6

local name, epoch, sequence, following = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local is_replayed, published, first_sequence = ARGV[5] == '1', ARGV[6], ARGV[7]
local n_done_before, n_units, is_last = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10] == '1'
local ttl_s, operations = tonumber(ARGV[11]), ARGV[12]

local source = load_source(name)
local is_new = source == nil
source = source or new_source(name, first_sequence)
local is_restart = false

if epoch ~= '' then
  if source.epoch == '' then
    is_restart = source.due ~= first_sequence
  elseif less(epoch, source.epoch) then
    return { OLD_EPOCH, '', 0 }
  else
    is_restart = epoch ~= source.epoch
  end
  is_new = is_new or source.epoch == ''
  source.epoch = epoch
elseif not is_replayed then
  if source.due == '' or less(sequence, source.due) then
    -- Another gateway may have been faster; only what was published later is of a new life.
    is_restart = less(source.published, published)
  elseif less(published, source.published) then
    -- The gateway that delivers it has not seen the restart yet that another one has.
    return { OLD_EPOCH, '', 0 }
  end
end

if is_restart then
  drop_holders(source.holders)
  drop_holders(source.pending)
  source.due, source.gap, source.gap_until, source.n_done = first_sequence, GAP_NONE, ZERO, 0
end
local restarted = is_restart and 1 or 0

if source.due == '' or less(sequence, source.due) then
  if is_new or is_restart then save_source(source, ttl_s) end
  return { DUPLICATE, '', restarted }
end

if sequence ~= source.due then
  if source.gap == GAP_NONE then
    source.gap, source.gap_until = GAP_OPEN, sequence
  elseif source.gap == GAP_OPEN and less(source.gap_until, sequence) then
    source.gap_until = sequence
  end
  save_source(source, ttl_s)
  return { GAP, source.due, restarted }
end

if source.n_done ~= n_done_before then
  -- Another gateway has done some parts of this batch.
  if is_new or is_restart then save_source(source, ttl_s) end
  return { PART, tostring(source.n_done), restarted }
end

read_blocks()
apply_operations(source, operations, false)
write_blocks(ttl_s)
if not is_last then
  source.n_done, source.published = n_done_before + n_units, published
  save_source(source, ttl_s)
  return { PART, tostring(source.n_done), restarted }
end
if source.gap == GAP_OPEN and not less(sequence, source.gap_until) then
  source.gap, source.gap_until = GAP_NONE, ZERO
end
source.due, source.n_done, source.published = following, 0, published
save_source(source, ttl_s)
return { is_restart and RESTARTED or APPLIED, '', restarted }

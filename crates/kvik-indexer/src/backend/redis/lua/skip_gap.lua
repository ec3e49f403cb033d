-- Gives up on missing batches: the number in ARGV[2] is due from now on.

local source = load_source(ARGV[1])
if not source or source.due == '' or not less(source.due, ARGV[2]) then return 0 end
source.due, source.gap, source.gap_until, source.n_done = ARGV[2], GAP_SKIPPED, ZERO, 0
save_source(source, tonumber(ARGV[3]))
return 1

-- Walks a prompt: KEYS[1] is the register, the other keys are its blocks in order. Answers one string for each
-- source that has anything: doubt, prefix and coverage by tier, the highest block, and the name.
--
-- Neighbors mostly have the same value, so a run of equal values is one step.

local keys, n_keys = KEYS, #KEYS
local register = keys[1]
local walks_all = ARGV[1] == 'A'
local call, sub = redis.call, string.sub
local FIRST_READ, LARGEST_READ = 32, 512

local rows = {}
local row_of = {}
-- By holder: its row, or false if its life is over or has not begun, and its tier, if the register knows it.
local row_of_holder, tier_of_holder = {}, {}
local steps = {}
local dead = {}

local function learn_holders(holders)
  local fields = {}
  for at = 1, #holders do fields[at] = 'h' .. holders[at] end
  for first = 1, #fields, 1000 do
    local last = math.min(first + 999, #fields)
    local found = call('HMGET', register, unpack(fields, first, last))
    for at = first, last do
      local holder, field = holders[at], found[at - first + 1]
      local tier = field and field:byte(1)
      row_of_holder[holder] = false
      -- Above 3 it is the tier of a replacement that is not complete.
      tier_of_holder[holder] = tier
      if tier and tier < 4 then
        local name = sub(field, 2)
        local row = row_of[name]
        if not row then
          -- The prefix by tier, then the coverage by tier.
          row = { 0, 0, 0, 0, 0, 0, 0, 0, name = name, reach = 0, highest = 0, step = 0 }
          row_of[name] = row
          rows[#rows + 1] = row
        end
        row_of_holder[holder] = row
      end
    end
  end
end

-- The rows of a value, each with the fastest tier; nil if there are holders that the register was not asked about.
local n_steps = 0
local function known_step_of(value)
  local rows_here, tiers_here, n_rows = {}, {}, 0
  local is_dead = true
  n_steps = n_steps + 1
  for at = 1, #value, 8 do
    local holder = sub(value, at, at + 4)
    local row = row_of_holder[holder]
    if row then
      local tier = tier_of_holder[holder] + 1
      is_dead = false
      if row.step ~= n_steps then
        n_rows = n_rows + 1
        row.step, row.place = n_steps, n_rows
        rows_here[n_rows], tiers_here[n_rows] = row, tier
      elseif tier < tiers_here[row.place] then
        tiers_here[row.place] = tier
      end
    elseif row == nil then
      return nil
    elseif tier_of_holder[holder] then
      is_dead = false
    end
  end
  return { rows = rows_here, tiers = tiers_here, n_rows = n_rows, is_dead = is_dead and value ~= '' }
end

local function step_of(value)
  local step = known_step_of(value)
  if step then return step end
  local unknown = {}
  for at = 1, #value, 8 do
    local holder = sub(value, at, at + 4)
    if row_of_holder[holder] == nil then unknown[#unknown + 1] = holder end
  end
  learn_holders(unknown)
  return known_step_of(value)
end

-- Counts a run of blocks with one value, behind the first `before` of the prompt. True if a source has all so far.
local function count_run(step, before, n_blocks)
  local is_reached = false
  local reach = before + n_blocks
  local rows_here, tiers_here = step.rows, step.tiers
  for place = 1, step.n_rows do
    local row, tier = rows_here[place], tiers_here[place]
    if row.reach == before then
      row.reach = reach
      row[tier] = row[tier] + n_blocks
      is_reached = true
    end
    if walks_all then
      row[tier + 4] = row[tier + 4] + n_blocks
      row.highest = reach
    end
  end
  return is_reached
end

local function walk()
  local first, n_read = 2, FIRST_READ
  local run_value, run_step, run_start, run_is_dead = nil, nil, 0, false
  local at = 0
  while first <= n_keys do
    local last = math.min(first + n_read - 1, n_keys)
    local found = call('MGET', unpack(keys, first, last))
    for offset = 1, last - first + 1 do
      local value = found[offset]
      if value ~= run_value then
        if run_step and not count_run(run_step, run_start, at - run_start) and not walks_all then return end
        run_step = steps[value]
        if not run_step then
          run_step = step_of(value and #value % 8 == 0 and value or '')
          steps[value] = run_step
        end
        run_value, run_start, run_is_dead = value, at, run_step.is_dead
        if run_step.n_rows == 0 and not walks_all then
          if run_is_dead then dead[1] = keys[first + offset - 1] end
          return
        end
      end
      if run_is_dead then dead[#dead + 1] = keys[first + offset - 1] end
      at = at + 1
    end
    first, n_read = last + 1, math.min(n_read * 4, LARGEST_READ)
  end
  if run_step then count_run(run_step, run_start, at - run_start) end
end

walk()

-- Blocks that only lives that are over have had.
for first = 1, #dead, 1000 do
  call('UNLINK', unpack(dead, first, math.min(first + 999, #dead)))
end

local found, fields = {}, {}
for _, row in ipairs(rows) do
  if row.reach > 0 or row.highest > 0 then
    found[#found + 1] = row
    fields[#fields + 1] = 's' .. row.name
  end
end
local answer = {}
for first = 1, #fields, 1000 do
  local last = math.min(first + 999, #fields)
  local records = call('HMGET', register, unpack(fields, first, last))
  for at = first, last do
    local row, record = found[at], records[at - first + 1]
    local is_unsure = record and #record >= 19 and record:byte(19) ~= 0
    answer[at] = struct.pack('>BI4I4I4I4I4I4I4I4I4', is_unsure and 1 or 0,
      row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row.highest) .. row.name
  end
end
return answer

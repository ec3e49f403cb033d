-- The register of a book (KEYS[1]) and the values of its blocks (the other keys); every writing script
-- begins with this.
--
-- Strings are ordered by the server's locale, so `<` is only used on numbers of at most 40 bits.

local register = KEYS[1]
local ZERO = string.rep('\0', 8)
local NO_HOLDER = string.rep('\0', 5)
local RECORD_BYTES = 79
local GAP_NONE, GAP_OPEN, GAP_SKIPPED = 0, 1, 2
local MAX_COUNT = 16777215

-- Whether one number of eight bytes, big endian, is below another.
local function less(a, b)
  local a_high, a_low = struct.unpack('>I4I4', a)
  local b_high, b_low = struct.unpack('>I4I4', b)
  return a_high < b_high or (a_high == b_high and a_low < b_low)
end

local function packed_option(value)
  return value == '' and ('\0' .. ZERO) or ('\1' .. value)
end

local function unpacked_option(record, at)
  return record:byte(at) == 1 and record:sub(at + 1, at + 8) or ''
end

local function unpacked_holders(record, at)
  local holders = {}
  for tier = 0, 3 do
    local holder = record:sub(at + tier * 5, at + tier * 5 + 4)
    holders[tier] = holder ~= NO_HOLDER and holder or nil
  end
  return holders
end

local function packed_holders(holders)
  return (holders[0] or NO_HOLDER) .. (holders[1] or NO_HOLDER)
    .. (holders[2] or NO_HOLDER) .. (holders[3] or NO_HOLDER)
end

-- Where a source stands, or nil if it is not in the register.
local function load_source(name)
  local record = redis.call('HGET', register, 's' .. name)
  if not record or #record ~= RECORD_BYTES then return nil end
  return {
    name = name,
    epoch = unpacked_option(record, 1),
    due = unpacked_option(record, 10),
    gap = record:byte(19),
    gap_until = record:sub(20, 27),
    published = record:sub(28, 35),
    n_done = struct.unpack('>I4', record, 36),
    holders = unpacked_holders(record, 40),
    pending = unpacked_holders(record, 60),
  }
end

local function new_source(name, first_sequence)
  return {
    name = name, epoch = '', due = first_sequence, gap = GAP_NONE, gap_until = ZERO, published = ZERO,
    n_done = 0, holders = {}, pending = {},
  }
end

-- The register outlives every block that was written before this call.
local function save_source(source, ttl_s)
  local record = packed_option(source.epoch) .. packed_option(source.due) .. string.char(source.gap)
    .. source.gap_until .. source.published .. struct.pack('>I4', source.n_done)
    .. packed_holders(source.holders) .. packed_holders(source.pending)
  redis.call('HSET', register, 's' .. source.name, record)
  if ttl_s > 0 then redis.call('EXPIRE', register, 2 * ttl_s) end
end

-- Which holders of values are in the register; the others are of lives that are over.
local known = {}

local function is_known(holder)
  local answer = known[holder]
  if answer == nil then
    answer = redis.call('HEXISTS', register, 'h' .. holder) == 1
    known[holder] = answer
  end
  return answer
end

-- Makes a holder with a number that no holder of this book ever had. A register that was lost begins above
-- all numbers of the lost one, unless that gave out more than 256 a second for all of its life.
local function open_holder(name, tier, is_pending)
  if redis.call('HEXISTS', register, 'n') == 0 then
    local now_s = tonumber(redis.call('TIME')[1])
    redis.call('HSET', register, 'n', string.format('%.0f', now_s * 256))
  end
  local number = redis.call('HINCRBY', register, 'n', 1)
  local holder = struct.pack('>BI4', math.floor(number / 4294967296) % 256, number % 4294967296)
  redis.call('HSET', register, 'h' .. holder, string.char(tier + (is_pending and 128 or 0)) .. name)
  known[holder] = true
  return holder
end

local function drop_holders(holders)
  for tier = 0, 3 do
    local holder = holders[tier]
    if holder then
      redis.call('HDEL', register, 'h' .. holder)
      known[holder] = false
      holders[tier] = nil
    end
  end
end

local values = {}
local changed = {}

-- Reads the values of all blocks that the script was given. What is no value of ours counts as none.
local function read_blocks()
  for first = 2, #KEYS, 1000 do
    local last = math.min(first + 999, #KEYS)
    local found = redis.call('MGET', unpack(KEYS, first, last))
    for at = first, last do
      local value = found[at - first + 1]
      values[KEYS[at]] = value and #value % 8 == 0 and value or ''
    end
  end
end

local function write_blocks(ttl_s)
  for key, is_stored in pairs(changed) do
    local value = values[key]
    if value == '' then
      redis.call('DEL', key)
    elseif not is_stored then
      redis.call('SET', key, value, 'KEEPTTL')
    elseif ttl_s > 0 then
      redis.call('SET', key, value, 'EX', ttl_s)
    else
      redis.call('SET', key, value)
    end
  end
end

local function holder_number(holder)
  local high, low = struct.unpack('>BI4', holder)
  return high * 4294967296 + low
end

-- A value with one more store of a holder, and without holders whose life is over.
local function value_with(value, holder)
  local parts = {}
  local number = holder_number(holder)
  local is_placed = false
  for at = 1, #value, 8 do
    local other = value:sub(at, at + 4)
    if other == holder then
      local a, b, c = value:byte(at + 5, at + 7)
      local count = math.min(a * 65536 + b * 256 + c + 1, MAX_COUNT)
      parts[#parts + 1] = holder .. struct.pack('>I4', count):sub(2, 4)
      is_placed = true
    elseif is_known(other) then
      if not is_placed and holder_number(other) > number then
        parts[#parts + 1] = holder .. '\0\0\1'
        is_placed = true
      end
      parts[#parts + 1] = value:sub(at, at + 7)
    end
  end
  if not is_placed then parts[#parts + 1] = holder .. '\0\0\1' end
  return table.concat(parts)
end

-- A value with one store of a holder less, or with none of it.
local function value_without(value, holder, whole)
  local parts = {}
  for at = 1, #value, 8 do
    local other = value:sub(at, at + 4)
    if other == holder then
      local a, b, c = value:byte(at + 5, at + 7)
      local count = a * 65536 + b * 256 + c - 1
      if not whole and count > 0 then
        parts[#parts + 1] = holder .. struct.pack('>I4', count):sub(2, 4)
      end
    elseif is_known(other) then
      parts[#parts + 1] = value:sub(at, at + 7)
    end
  end
  return table.concat(parts)
end

-- Changes so many blocks from the place `first` of KEYS on. Neighbors mostly have the same value, so each
-- different value is looked at once.
local function change_blocks(first, n_blocks, is_store, change)
  local changes = {}
  for at = first, first + n_blocks - 1 do
    local key = KEYS[at]
    local value = values[key]
    local new = changes[value]
    if new == nil then
      new = change(value)
      changes[value] = new
    end
    if is_store then
      values[key] = new
      changed[key] = true
    elseif new ~= value then
      values[key] = new
      changed[key] = changed[key] or false
    end
  end
end

-- Does what a string of operations says: a letter, a tier and a number of blocks each. `pending` says whether
-- stores are those of a replacement.
local function apply_operations(source, operations, pending)
  local holders = pending and source.pending or source.holders
  local at = 2
  for offset = 1, #operations, 6 do
    local letter, tier, n_blocks = struct.unpack('>c1BI4', operations, offset)
    if letter == 'S' then
      if not holders[tier] then holders[tier] = open_holder(source.name, tier, pending) end
      local holder = holders[tier]
      change_blocks(at, n_blocks, true, function(value) return value_with(value, holder) end)
    elseif letter == 'R' and holders[tier] then
      local holder = holders[tier]
      change_blocks(at, n_blocks, false, function(value) return value_without(value, holder, false) end)
    elseif letter == 'C' and tier == 4 then
      drop_holders(holders)
    elseif letter == 'C' then
      drop_holders({ [tier] = holders[tier] })
      holders[tier] = nil
    end
    at = at + n_blocks
  end
end

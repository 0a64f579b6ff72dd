-- The index of a redis tier: the commands that must be atomic. ARGV: prefix, command, the command's arguments.
--
--   rows       hash     key -> "nbytes pinned hits last_used n_tokens n_layers sizes", "" -> bytes of all entries,
--                       "#" -> number of unpinned entries, "~" -> name of the recount under way
--   used       zset     key -> last_used, for unpinned entries; it must be rebuilt if it has not as many as "#" says
--   due        zset     key -> when the entry expires
--   writing    zset     "nbytes:token" of an upload -> when its reserved room is released
--   chunk:KEY  hash     an entry: head, 0, 1, ...
--   sum:NAME   hash     a recount: key -> "" for each row counted so far, and their sums in "" and "#"; it expires
--   new:UPLOAD hash     an upload that is not complete yet; it expires. The pieces 7+0, 7+1, ... of a large layer are
--                       joined later
--
-- All times are the server's, in seconds, because the clocks of machines differ. When the memory is full, Redis
-- refuses a script whose first write may need memory, but no later write of it. So the writes that free memory come
-- first, and only `reserve` is refused.

local prefix = ARGV[1]
local rows, used, due, writing = prefix .. 'rows', prefix .. 'used', prefix .. 'due', prefix .. 'writing'
local chunk, new, sum = prefix .. 'chunk:', prefix .. 'new:', prefix .. 'sum:'
local call = redis.call
local time = call('TIME')
local now = time[1] + time[2] / 1e6
local stamp = string.format('%.6f', now)

-- The bytes that a row or an upload's name begins with; 0 for more digits than a Lua number holds exactly. Rows may be
-- damaged, or written by somebody else.
local function nbytes_of(text)
  local digits = string.match(text or '', '^%d+')
  return digits and #digits <= 15 and tonumber(digits) or 0
end

-- The fields of a row: nbytes, pinned, hits, last use, description (the rest); nothing for a damaged row.
local function parse(row)
  local nbytes, pinned, hits, when, description = string.match(row or '', '^(%d+) ([01]) (%d+) (%d+%.?%d*) (.*)$')
  if nbytes and #nbytes <= 15 and #hits <= 15 and #when <= 20 then
    return nbytes, pinned, hits, when, description
  end
end

-- The last use of an unpinned entry, which is its score in `used`; nil if it is pinned.
local function score(row)
  local _, pinned, _, when = parse(row)
  return pinned == '0' and when or nil
end

-- Bytes of all entries. If their sum is missing or is no number, it is recomputed from all rows.
local function entries_nbytes()
  local nbytes = tonumber(call('HGET', rows, ''))
  if nbytes and nbytes >= 0 and nbytes < 1e18 then
    return nbytes
  end
  nbytes = 0
  if call('HLEN', rows) == 0 then
    return nbytes
  end
  for _, row in ipairs(call('HVALS', rows)) do
    nbytes = nbytes + (parse(row) and nbytes_of(row) or 0)
  end
  redis.pcall('HSET', rows, '', nbytes) -- not an error if the server refuses the write
  return nbytes
end

-- Bytes of all entries, and of the room reserved for uploads.
local function total_nbytes()
  local nbytes = entries_nbytes()
  for _, upload in ipairs(call('ZRANGE', writing, 0, -1)) do
    nbytes = nbytes + nbytes_of(upload)
  end
  return nbytes
end

-- Add to both sums of a hash. A sum that is no number is deleted; `entries_nbytes` or a recount recomputes it.
local function add(name, nbytes, n)
  for field, delta in pairs({[''] = nbytes, ['#'] = n}) do
    if delta ~= 0 and type(redis.pcall('HINCRBY', name, field, delta)) ~= 'number' then
      call('HDEL', name, field)
    end
  end
end

-- The name of the recount under way; nil if there is none, or if its sums are gone.
local function recount_under_way()
  local name = call('HGET', rows, '~')
  return name and call('EXISTS', sum .. name) == 1 and name or nil
end

-- Update the sums after a row has changed from `old` to `row`; either may be nil. The sums of a recount are updated,
-- too, if it has counted the old row or if there was no old row.
local function count(key, old, row)
  local nbytes, n = nbytes_of(row) - nbytes_of(old), (score(row) and 1 or 0) - (score(old) and 1 or 0)
  add(rows, nbytes, n)
  local name = recount_under_way()
  if name and (not old or call('HEXISTS', sum .. name, key) == 1) then
    add(sum .. name, nbytes, n)
    if row then
      call('HSET', sum .. name, key, '')
    else
      call('HDEL', sum .. name, key)
    end
  end
end

-- Delete an entry. Returns 1 if there was one, else 0, and its bytes.
local function drop(key)
  local existed = call('UNLINK', chunk .. key)
  call('ZREM', used, key)
  call('ZREM', due, key)
  local row = call('HGET', rows, key)
  if not row then
    return existed, 0
  end
  call('HDEL', rows, key)
  count(key, row, nil)
  return 1, nbytes_of(row)
end

-- Delete an upload and release its room. Returns 1 if it had reserved any, else 0.
local function abandon(upload)
  call('UNLINK', new .. upload)
  return call('ZREM', writing, upload)
end

-- Write the row of an entry whose last use was at `when`. It expires in `ttl` seconds; never if ttl is 0 or it is
-- pinned.
local function write_row(key, nbytes, pinned, hits, when, description, ttl)
  local expires = tonumber(ttl) > 0 and pinned == '0'
  if expires then
    call('PEXPIREAT', chunk .. key, math.ceil((now + ttl) * 1000))
    call('ZADD', due, now + ttl, key)
  else
    call('PERSIST', chunk .. key)
    call('ZREM', due, key)
  end
  local old, row = call('HGET', rows, key), table.concat({nbytes, pinned, hits, when, description}, ' ')
  call('HSET', rows, key, row)
  count(key, old, row)
  if pinned == '0' then
    call('ZADD', used, when, key)
  else
    call('ZREM', used, key)
  end
  return 1
end

-- Set last uses that lie in the future, because the server's clock once ran ahead, to now: up to 100 entries at a time.
local function settle_uses(ttl)
  for _, key in ipairs(call('ZRANGEBYSCORE', used, '(' .. stamp, '+inf', 'LIMIT', 0, 100)) do
    local nbytes, pinned, hits, _, description = parse(call('HGET', rows, key))
    if nbytes then
      write_row(key, nbytes, pinned, hits, stamp, description, ttl)
    end
  end
end

-- Call a function with each argument from index `from` on, and return the sum of its results.
local function each(from, act)
  local n = 0
  for i = from, #ARGV do
    n = n + act(ARGV[i])
  end
  return n
end

-- Before every command: abandon uploads whose lease has ended, and drop up to 1000 entries that have expired.
local expired, orphans, freed = 0, 0, 0
for _, upload in ipairs(call('ZRANGEBYSCORE', writing, '-inf', now)) do
  abandon(upload)
  orphans, freed = orphans + 1, freed + nbytes_of(upload)
end
for _, key in ipairs(call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, 1000)) do
  local n, nbytes = drop(key)
  expired, freed = expired + n, freed + nbytes
end

local commands = {}

-- What was dropped just now: expired entries, abandoned uploads, the bytes of both; and the time.
function commands.expire()
  return {expired, orphans, freed, stamp}
end

-- The time, and the rows of these keys.
function commands.look()
  return {stamp, call('HMGET', rows, unpack(ARGV, 3))}
end

-- Bytes of all entries and uploads.
function commands.weigh()
  return total_nbytes()
end

-- Unpinned entries in the order of their last use, from index `first` to index `last`. Returns the time, 1 if the order
-- is complete (0: rebuild it), keys, rows.
function commands.oldest(first, last)
  local keys, n = call('ZRANGE', used, first, last), tonumber(call('HGET', rows, '#') or -1)
  return {stamp, call('ZCARD', used) == n and 1 or 0, keys, #keys > 0 and call('HMGET', rows, unpack(keys)) or {}}
end

-- Reserve room for an upload. If it does not fit, drop victims, given as (key, row when it was chosen); a victim
-- whose row has changed since is spared. Returns {1, number of victims dropped} or, with nothing dropped, {0, bytes
-- to free}.
function commands.reserve(upload, capacity, lease)
  local nbytes, victims = nbytes_of(upload), {}
  local short = total_nbytes() + nbytes - capacity
  local excess = short
  for i = 6, #ARGV, 2 do
    if short > 0 and call('HGET', rows, ARGV[i]) == ARGV[i + 1] then
      table.insert(victims, ARGV[i])
      excess = excess - nbytes_of(ARGV[i + 1])
    end
  end
  if excess > 0 then
    return {0, short}
  end
  for _, key in ipairs(victims) do
    drop(key)
  end
  if nbytes > 0 then
    call('ZADD', writing, now + lease, upload)
  end
  return {1, #victims}
end

-- Extend the lease of an upload's room and bytes. Returns 0 if either is gone.
function commands.renew(upload, lease)
  if not call('ZSCORE', writing, upload) then
    return 0
  end
  call('ZADD', writing, now + lease, upload)
  return call('PEXPIRE', new .. upload, math.ceil(lease * 1000))
end

-- Join the n pieces of a field into the field. Returns 0 if a piece is missing.
function commands.join(upload, lease, field, n)
  local name, names = new .. upload, {}
  for i = 1, n do
    names[i] = field .. '+' .. (i - 1)
  end
  local pieces = call('HMGET', name, unpack(names))
  call('HDEL', name, unpack(names))
  for i = 1, n do
    if not pieces[i] then
      return 0
    end
  end
  call('HSET', name, field, table.concat(pieces))
  pieces = nil
  collectgarbage() -- or the server would hold on to some megabytes
  return call('PEXPIRE', name, math.ceil(lease * 1000))
end

-- Turn an upload into an entry if it is complete and still has its room, else delete it and return 0. Hits and pin
-- of an older entry of that key are kept.
function commands.publish(upload, key, description, n_fields, ttl)
  local whole = call('HLEN', new .. upload) == tonumber(n_fields)
  if call('ZREM', writing, upload) == 0 or not whole then
    call('UNLINK', new .. upload)
    return 0
  end
  local old = call('HGET', rows, key)
  local _, pinned, hits = parse(old)
  call('UNLINK', chunk .. key)
  call('RENAME', new .. upload, chunk .. key)
  write_row(key, nbytes_of(upload), pinned or '0', hits or '0', stamp, description, ttl)
  settle_uses(ttl)
  return 1
end

function commands.abandon(upload)
  return abandon(upload)
end

-- Set the last use of entries to now and add `n_hits` hits to each. Returns how many there were.
function commands.touch(n_hits, ttl)
  local n = each(5, function(key)
    local nbytes, pinned, hits, _, description = parse(call('HGET', rows, key))
    return nbytes and write_row(key, nbytes, pinned, hits + n_hits, stamp, description, ttl) or 0
  end)
  settle_uses(ttl)
  return n
end

-- Pin ("1") or unpin ("0") entries. Returns how many there were.
function commands.pin(pinned, ttl)
  return each(5, function(key)
    local nbytes, _, hits, when, description = parse(call('HGET', rows, key))
    return nbytes and write_row(key, nbytes, pinned, hits, when, description, ttl) or 0
  end)
end

-- Delete entries. Returns how many there were.
function commands.delete()
  return each(3, function(key) return (drop(key)) end)
end

-- Drop a row that describes no entry. The sums are deleted, too, as they may or may not include it.
function commands.drop_damaged_row(key)
  local n = drop(key)
  call('HDEL', rows, '', '#')
  return n
end

-- Drop an entry that could not be read, unless it was rewritten since. Returns 0 if it was, or if the entry had
-- expired.
function commands.drop_unreadable(key, head)
  local found = redis.pcall('HGET', chunk .. key, 'head')
  if (type(found) == 'string' and found or '') ~= head then
    return 0
  end
  local expiry = call('ZSCORE', due, key)
  local n = drop(key)
  return expiry and tonumber(expiry) <= now and 0 or n
end

-- Return those of these keys that have a row but no chunk.
function commands.without_bytes()
  local found = {}
  each(3, function(key)
    if call('EXISTS', chunk .. key) == 0 and call('HEXISTS', rows, key) == 1 then
      table.insert(found, key)
    end
    return 0
  end)
  return found
end

local NAME_PATTERNS = {chunk = '^%x+%.%x+%.[-~%x]*%.[%w_-]+$', new = '^%d+:%x+$'}

-- Delete chunks without a row (kind "chunk") or uploads without room (kind "new"). Returns how many, and their
-- bytes. Keys of another form or type were written by somebody else and are left alone.
function commands.sweep(kind)
  local n, nbytes = 0, 0
  each(4, function(name)
    local full = prefix .. kind .. ':' .. name
    local known = kind == 'new' and call('ZSCORE', writing, name) or call('HEXISTS', rows, name) == 1
    if not known and string.match(name, NAME_PATTERNS[kind]) and call('TYPE', full).ok == 'hash' then
      for _, field in ipairs(call('HKEYS', full)) do
        nbytes = nbytes + call('HSTRLEN', full, field)
      end
      n = n + call('UNLINK', full)
    end
    return 0
  end)
  return {n, nbytes}
end

-- Remove keys from `used` that are not unpinned entries. Returns how many.
function commands.prune()
  return each(3, function(key)
    return score(call('HGET', rows, key)) and 0 or call('ZREM', used, key)
  end)
end

-- Recount one page of the rows, and add its unpinned entries to `used`. Returns {cursor of the next page, name of the
-- recount}; the cursor is "0" after the last page.
--
-- A client asks for the first page with cursor "0" and a new name. If a recount is under way already, the client
-- joins it and gets its name. The first client that has scanned all rows ends the recount. Rows that are written
-- meanwhile are counted when they are written (see `count`).
function commands.recount(name, cursor, n, lease)
  call('HDEL', rows, '-') -- so that nothing below is refused where memory is full
  local current = recount_under_way()
  if cursor ~= '0' and current ~= name then
    return {'0', name} -- another has ended it, or the server has dropped it
  end
  if not current then
    call('HSET', rows, '~', name)
    call('HSET', sum .. name, '', 0, '#', 0)
  end
  local counted = sum .. (current or name)
  call('PEXPIRE', counted, math.ceil(lease * 1000))
  local page = call('HSCAN', rows, cursor, 'COUNT', n)
  for i = 1, #page[2], 2 do
    local key, row = page[2][i], page[2][i + 1]
    if #key > 1 and call('HSETNX', counted, key, '') == 1 then
      add(counted, nbytes_of(row), score(row) and 1 or 0)
      if score(row) then
        call('ZADD', used, score(row), key)
      end
    end
  end
  if page[1] == '0' then
    local sums = call('HMGET', counted, '', '#')
    call('HSET', rows, '', sums[1], '#', sums[2])
    call('HDEL', rows, '~')
    call('UNLINK', counted)
  end
  return {page[1], current or name}
end

return commands[ARGV[2]](unpack(ARGV, 3, 8))

-- The index of a redis tier: whatever must happen at once. ARGV: prefix, command, its arguments.
--
--   rows       hash     key -> "nbytes pinned hits last_used n_tokens n_layers sizes", "" -> bytes of all entries,
--                       "#" -> how many are not pinned, "~" -> the name of the recount under way
--   used       zset     key -> last_used, of those that are not pinned: as many as "#" says, or it is to be made anew
--   due        zset     key -> when the entry vanishes
--   writing    zset     "nbytes:token" of an upload -> when its room is given back
--   chunk:KEY  hash     an entry: head, 0, 1, ...
--   sum:NAME   hash     a recount: key -> "" of those counted so far, "" and "#" of these alone; it expires by itself
--   new:UPLOAD hash     one that is not whole yet; it expires by itself. A large layer comes as 7+0, 7+1, ..., to be joined
--
-- All times are the server's, in seconds: clocks of machines differ. When its memory is full, Redis refuses a script's first write if
-- that may take memory, and lets pass all that follow a write: so what frees comes first, and only `reserve` is refused.

local prefix = ARGV[1]
local rows, used, due, writing = prefix .. 'rows', prefix .. 'used', prefix .. 'due', prefix .. 'writing'
local chunk, new, sum = prefix .. 'chunk:', prefix .. 'new:', prefix .. 'sum:'
local call = redis.call
local time = call('TIME')
local now = time[1] + time[2] / 1e6
local stamp = string.format('%.6f', now)

-- Whoever wrote a row, its numbers are counted with: none of more digits than a number has here without loss.
local function weight(text)
  local digits = string.match(text or '', '^%d+')
  return digits and #digits <= 15 and tonumber(digits) or 0
end

local function parts(row)
  local nbytes, pinned, hits, when, about = string.match(row or '', '^(%d+) ([01]) (%d+) (%d+%.?%d*) (.*)$')
  if nbytes and #nbytes <= 15 and #hits <= 15 and #when <= 20 then
    return nbytes, pinned, hits, when, about
  end
end


-- When an entry was used last, if it is not pinned.
local function place(row)
  local _, pinned, _, when = parts(row)
  return pinned == '0' and when or nil
end

-- Bytes of all entries; counted anew, row by row, where their sum is gone or is no number.
local function kept()
  local nbytes = tonumber(call('HGET', rows, ''))
  if nbytes and nbytes >= 0 and nbytes < 1e18 then
    return nbytes
  end
  nbytes = 0
  if call('HLEN', rows) == 0 then
    return nbytes
  end
  for _, row in ipairs(call('HVALS', rows)) do
    nbytes = nbytes + (parts(row) and weight(row) or 0)
  end
  redis.pcall('HSET', rows, '', nbytes) -- where it may be written
  return nbytes
end

local function total()
  local nbytes = kept()
  for _, upload in ipairs(call('ZRANGE', writing, 0, -1)) do
    nbytes = nbytes + weight(upload)
  end
  return nbytes
end

-- A sum that is no number goes: `kept` and a recount make it anew.
local function add(name, nbytes, n)
  for field, more in pairs({[''] = nbytes, ['#'] = n}) do
    if more ~= 0 and type(redis.pcall('HINCRBY', name, field, more)) ~= 'number' then
      call('HDEL', name, field)
    end
  end
end

-- The recount under way, none if what it has counted is gone.
local function recount_under_way()
  local name = call('HGET', rows, '~')
  return name and call('EXISTS', sum .. name) == 1 and name or nil
end

-- A row becomes another, or none. A recount learns of it if it has counted the old one, or if there was none to count.
local function count(key, old, row)
  local nbytes, n = weight(row) - weight(old), (place(row) and 1 or 0) - (place(old) and 1 or 0)
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

-- Forget an entry; 1 if there was one, and its bytes.
local function drop(key)
  local there = call('UNLINK', chunk .. key)
  call('ZREM', used, key)
  call('ZREM', due, key)
  local row = call('HGET', rows, key)
  if not row then
    return there, 0
  end
  call('HDEL', rows, key)
  count(key, row, nil)
  return 1, weight(row)
end

local function abandon(upload)
  call('UNLINK', new .. upload)
  return call('ZREM', writing, upload)
end

-- Write down an entry used at that time. It stays for ttl from now; without one, or pinned, for good.
local function keep(key, nbytes, pinned, hits, when, about, ttl)
  local goes = tonumber(ttl) > 0 and pinned == '0'
  if goes then
    call('PEXPIREAT', chunk .. key, math.ceil((now + ttl) * 1000))
    call('ZADD', due, now + ttl, key)
  else
    call('PERSIST', chunk .. key)
    call('ZREM', due, key)
  end
  local old, row = call('HGET', rows, key), table.concat({nbytes, pinned, hits, when, about}, ' ')
  call('HSET', rows, key, row)
  count(key, old, row)
  if pinned == '0' then
    call('ZADD', used, when, key)
  else
    call('ZREM', used, key)
  end
  return 1
end

-- Some of what was used beyond now, as the server's clock ran ahead then, was used now: it grows old from here on.
local function settle(ttl)
  for _, key in ipairs(call('ZRANGEBYSCORE', used, '(' .. stamp, '+inf', 'LIMIT', 0, 100)) do
    local nbytes, pinned, hits, _, about = parts(call('HGET', rows, key))
    if nbytes then
      keep(key, nbytes, pinned, hits, stamp, about, ttl)
    end
  end
end

local function each(from, act)
  local n = 0
  for i = from, #ARGV do
    n = n + act(ARGV[i])
  end
  return n
end

-- Uploads whose time is over give their room back, entries that are due vanish.
local expired, orphans, freed = 0, 0, 0
for _, upload in ipairs(call('ZRANGEBYSCORE', writing, '-inf', now)) do
  abandon(upload)
  orphans, freed = orphans + 1, freed + weight(upload)
end
for _, key in ipairs(call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, 1000)) do
  local n, nbytes = drop(key)
  expired, freed = expired + n, freed + nbytes
end

local commands = {}

function commands.expire()
  return {expired, orphans, freed, stamp}
end

function commands.look()
  return {stamp, call('HMGET', rows, unpack(ARGV, 3))}
end

function commands.weigh()
  return total()
end

-- Entries by their last use, from the first to the last of these places: the time, whether that is all of them (or the
-- server has dropped their order on its own), keys, rows.
function commands.oldest(first, last)
  local keys, n = call('ZRANGE', used, first, last), tonumber(call('HGET', rows, '#') or -1)
  return {stamp, call('ZCARD', used) == n and 1 or 0, keys, #keys > 0 and call('HMGET', rows, unpack(keys)) or {}}
end

-- Take room, dropping the victims (key, row as it was seen) if it lacks any; {1, how many} or {0, bytes short}.
function commands.reserve(upload, capacity, lease)
  local nbytes, victims = weight(upload), {}
  local short = total() + nbytes - capacity
  local excess = short
  for i = 6, #ARGV, 2 do
    if short > 0 and call('HGET', rows, ARGV[i]) == ARGV[i + 1] then
      table.insert(victims, ARGV[i])
      excess = excess - weight(ARGV[i + 1])
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

-- Keep the room and the bytes of an upload for longer; 0 if they are gone.
function commands.renew(upload, lease)
  if not call('ZSCORE', writing, upload) then
    return 0
  end
  call('ZADD', writing, now + lease, upload)
  return call('PEXPIRE', new .. upload, math.ceil(lease * 1000))
end

-- Make one field of its pieces; 0 if one of them is gone.
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
  collectgarbage() -- of which the server would keep some megabytes
  return call('PEXPIRE', name, math.ceil(lease * 1000))
end

-- The upload becomes the entry, if it is whole and still has its room; hits and pin of an earlier one stay.
function commands.publish(upload, key, about, n_fields, ttl)
  local whole = call('HLEN', new .. upload) == tonumber(n_fields)
  if call('ZREM', writing, upload) == 0 or not whole then
    call('UNLINK', new .. upload)
    return 0
  end
  local old = call('HGET', rows, key)
  local _, pinned, hits = parts(old)
  call('UNLINK', chunk .. key)
  call('RENAME', new .. upload, chunk .. key)
  keep(key, weight(upload), pinned or '0', hits or '0', stamp, about, ttl)
  settle(ttl)
  return 1
end

function commands.abandon(upload)
  return abandon(upload)
end

-- Entries were used: so many hits each.
function commands.touch(more, ttl)
  local n = each(5, function(key)
    local nbytes, pinned, hits, _, about = parts(call('HGET', rows, key))
    return nbytes and keep(key, nbytes, pinned, hits + more, stamp, about, ttl) or 0
  end)
  settle(ttl)
  return n
end

function commands.pin(pinned, ttl)
  return each(5, function(key)
    local nbytes, _, hits, when, about = parts(call('HGET', rows, key))
    return nbytes and keep(key, nbytes, pinned, hits, when, about, ttl) or 0
  end)
end

function commands.delete()
  return each(3, function(key) return (drop(key)) end)
end

-- Drop a row that tells of no entry. Whether the sums held it nobody knows: they are made anew.
function commands.strange(key)
  local n = drop(key)
  call('HDEL', rows, '', '#')
  return n
end

-- Drop an entry that could not be read, unless it is another one by now; 0 also if it was time for it to vanish.
function commands.lost(key, head)
  local found = redis.pcall('HGET', chunk .. key, 'head')
  if (type(found) == 'string' and found or '') ~= head then
    return 0
  end
  local at = call('ZSCORE', due, key)
  local n = drop(key)
  return at and tonumber(at) <= now and 0 or n
end

-- Which of these entries have a row but no chunk.
function commands.hollow()
  local names = {}
  each(3, function(key)
    if call('EXISTS', chunk .. key) == 0 and call('HEXISTS', rows, key) == 1 then
      table.insert(names, key)
    end
    return 0
  end)
  return names
end

local names = {chunk = '^%x+%.%x+%.[-~%x]*%.[%w_-]+$', new = '^%d+:%x+$'}

-- Drop chunks without a row ("chunk") or uploads without room ("new"); how many, and their bytes. What is called or
-- kept otherwise than these is somebody else's.
function commands.sweep(kind)
  local n, nbytes = 0, 0
  each(4, function(name)
    local full = prefix .. kind .. ':' .. name
    local known = kind == 'new' and call('ZSCORE', writing, name) or call('HEXISTS', rows, name) == 1
    if not known and string.match(name, names[kind]) and call('TYPE', full).ok == 'hash' then
      for _, field in ipairs(call('HKEYS', full)) do
        nbytes = nbytes + call('HSTRLEN', full, field)
      end
      n = n + call('UNLINK', full)
    end
    return 0
  end)
  return {n, nbytes}
end

-- Take out of the order what has no place there.
function commands.prune()
  return each(3, function(key)
    return place(call('HGET', rows, key)) and 0 or call('ZREM', used, key)
  end)
end

-- Count a page of the rows anew and order it: {where the next page begins, the recount's name}, "0" after the last.
-- The first page is asked for under a name of one's own; one that is under way goes on, and whoever has seen all rows
-- since they came to it ends it: what is written meanwhile is counted as it is written.
function commands.recount(name, cursor, n, lease)
  call('HDEL', rows, '-') -- so that nothing below is refused where memory is full
  local going = recount_under_way()
  if cursor ~= '0' and going ~= name then
    return {'0', name} -- another has ended it, or the server has dropped it
  end
  if not going then
    call('HSET', rows, '~', name)
    call('HSET', sum .. name, '', 0, '#', 0)
  end
  local counted = sum .. (going or name)
  call('PEXPIRE', counted, math.ceil(lease * 1000))
  local page = call('HSCAN', rows, cursor, 'COUNT', n)
  for i = 1, #page[2], 2 do
    local key, row = page[2][i], page[2][i + 1]
    if #key > 1 and call('HSETNX', counted, key, '') == 1 then
      add(counted, weight(row), place(row) and 1 or 0)
      if place(row) then
        call('ZADD', used, place(row), key)
      end
    end
  end
  if page[1] == '0' then
    local sums = call('HMGET', counted, '', '#')
    call('HSET', rows, '', sums[1], '#', sums[2])
    call('HDEL', rows, '~')
    call('UNLINK', counted)
  end
  return {page[1], going or name}
end

return commands[ARGV[2]](unpack(ARGV, 3, 8))

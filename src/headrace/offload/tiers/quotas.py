"""Bytes per tenant on the remote server, kept by scripts there, each of which runs as one step.

Keys, all beginning with the tier's prefix; a member is what follows the prefix in a blob's key:

    of           hash: member -> "BYTES:TENANT"; "" -> bytes of all; "#" -> the clock, which counts uses
    use          sorted set: tenant -> bytes
    lru:TENANT   sorted set: member -> clock of its last use
    quota        hash: tenant -> bytes, of tenants with blobs that have another quota than the common one

Whose blob goes when room is needed is the rule of the other tiers (tiers.index): the least recently used of the tenant
that is furthest above its quota, the new blob counted; where nobody is above, of the one nearest to it. What would push
a tenant above its quota takes nothing from one that is within. A write looks at all tenants' sums. It brings its own
tenant's quota, which stays for the writes of others, of any engine; `quota` lost, the common one is theirs meanwhile.

The server may lose any of these keys (FLUSHALL, its own eviction), and other clients may write what they like into
them. A key of another type is deleted, which is a loss; a sum or a clock that is no number starts again. `use` and
`lru` are made again from `of` when a write finds that they do not agree; an entry of `of` that is none loses its blob.
What only a lost `of` named is not counted any more, and goes before all else.
"""

from __future__ import annotations

_COMMON = """
local p = ARGV[1]
local function typed(key, kind)
  if redis.call('TYPE', key).ok ~= kind then redis.call('DEL', key) end
  return key
end
local of, use, quota = typed(p .. 'of', 'hash'), typed(p .. 'use', 'zset'), typed(p .. 'quota', 'hash')
local function lru(tenant) return typed(p .. 'lru:' .. tenant, 'zset') end
local function whole(text, digits)
  if text and #text <= digits and string.find(text, '^%d+$') then return tonumber(text) end
end
local function entry(member)
  local was = redis.call('HGET', of, member)
  local colon = was and string.find(was, ':', 1, true)
  local bytes = colon and whole(string.sub(was, 1, colon - 1), 9)
  if not bytes then return nil, 0 end
  return string.sub(was, colon + 1), bytes
end
local function sum() return whole(redis.call('HGET', of, '') or '0', 15) end
local function restart()
  local tenants, fields = {}, redis.call('HKEYS', of)
  for i = 1, #fields do tenants[entry(fields[i]) or ''] = true end
  for tenant in pairs(tenants) do redis.call('ZUNIONSTORE', lru(tenant), 1, lru(tenant), 'WEIGHTS', 0) end
  redis.call('HSET', of, '#', 0)
end
if not sum() then redis.call('HSET', of, '', 0) end
if not whole(redis.call('HGET', of, '#') or '0', 15) then restart() end
local function tick() return redis.call('HINCRBY', of, '#', 1) end
local function take(tenant, bytes)
  redis.call('HINCRBY', of, '', 0 - bytes)
  if (tonumber(redis.call('ZINCRBY', use, 0 - bytes, tenant)) or 0) <= 0 then
    redis.call('ZREM', use, tenant)
    redis.call('HDEL', quota, tenant)
  end
end
local function used()
  local uses, sum, flat = {}, 0, redis.call('ZRANGE', use, 0, -1, 'WITHSCORES')
  for i = 1, #flat, 2 do
    uses[flat[i]] = tonumber(flat[i + 1]) or 0
    sum = sum + uses[flat[i]]
  end
  return uses, sum
end
local function gauges() return sum() or 0, math.max(0, redis.call('HLEN', of) - 2) end
local function forget(member)
  local tenant, bytes = entry(member)
  local there = redis.call('DEL', p .. member)
  redis.call('HDEL', of, member)
  if tenant then
    redis.call('ZREM', lru(tenant), member)
    take(tenant, bytes)
  end
  return there
end
"""

TOUCH = (
    _COMMON
    + """
local there = {}
for i = 2, #ARGV do
  local tenant = entry(ARGV[i])
  there[i - 1] = redis.call('TOUCH', p .. ARGV[i])
  if tenant and there[i - 1] == 1 then
    redis.call('ZADD', lru(tenant), tick(), ARGV[i])
  elseif tenant then
    forget(ARGV[i])
  end
end
return there
"""
)
"""ARGV: prefix, members. Returns 1 or 0 for each."""

DROP = (
    _COMMON
    + """
local there = 0
for i = 2, #ARGV do there = there + forget(ARGV[i]) end
return {there, gauges()}
"""
)
"""ARGV: prefix, members. Returns how many were there, bytes of all, blobs."""

PUT = (
    _COMMON
    + """
local member, writer, blob = ARGV[2], ARGV[3], ARGV[7]
local budget, common, own, size = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], #ARGV[7]
local function quotas(uses)
  local found = {}
  for tenant in pairs(uses) do found[tenant] = common end
  local flat = redis.call('HGETALL', quota)
  for i = 1, #flat, 2 do found[flat[i]] = whole(flat[i + 1], 15) or common end
  found[writer] = tonumber(own) or common
  return found
end
local function larger(a, b, beyond)
  if beyond[a] ~= beyond[b] then return beyond[a] > beyond[b] end
  if a == writer or b == writer then return a == writer end
  return a > b
end
local function giver(beyond, able)
  local found
  for tenant in pairs(able) do
    if not found or larger(tenant, found, beyond) then found = tenant end
  end
  return found
end
local function rebuild()
  local sums, all, fields = {}, 0, redis.call('HKEYS', of)
  for _, member in ipairs(fields) do
    local tenant, bytes = entry(member)
    if tenant then
      sums[tenant], all = (sums[tenant] or 0) + bytes, all + bytes
      redis.call('ZADD', lru(tenant), 'NX', 0, member)
    elseif member ~= '' and member ~= '#' then
      forget(member)
    end
  end
  redis.call('DEL', use)
  for tenant, bytes in pairs(sums) do redis.call('ZADD', use, bytes, tenant) end
  redis.call('HSET', of, '', all)
end
local function victims(rebuilt)
  local uses, excess = used()
  if excess ~= sum() and not rebuilt then
    rebuild()
    return victims(true)
  end
  uses[writer] = (uses[writer] or 0) + size
  excess = excess + size - budget
  local able, taken, list, beyond, limits = {}, {}, {}, {}, quotas(uses)
  for tenant in pairs(uses) do
    able[tenant], taken[tenant], beyond[tenant] = true, 0, uses[tenant] - limits[tenant]
  end
  while excess > 0 do
    local from = giver(beyond, able)
    if not from or (beyond[writer] > 0 and beyond[from] <= 0) then return nil end
    local oldest = redis.call('ZRANGE', lru(from), taken[from], taken[from])[1]
    if oldest then
      local _, bytes = entry(oldest)
      list[#list + 1] = {from, oldest}
      taken[from] = taken[from] + 1
      uses[from], beyond[from], excess = uses[from] - bytes, beyond[from] - bytes, excess - bytes
    elseif uses[from] > (from == writer and size or 0) and not rebuilt then
      rebuild()
      return victims(true)
    else
      able[from] = nil
    end
  end
  return list
end
local function evict(tenant, member)
  forget(member)
  redis.call('ZREM', lru(tenant), member)
end
local tenant = entry(member)
if tenant and redis.call('EXISTS', p .. member) == 1 then
  redis.call('ZADD', lru(tenant), tick(), member)
  return {0, 1, 0, gauges()}
end
forget(member)
local list = victims(false)
if not list then return {0, 0, 0, gauges()} end
for _, victim in ipairs(list) do evict(victim[1], victim[2]) end
redis.call('SET', p .. member, blob)
redis.call('HSET', of, member, size .. ':' .. writer)
take(writer, -size)
if tonumber(own) then redis.call('HSET', quota, writer, own) else redis.call('HDEL', quota, writer) end
redis.call('ZADD', lru(writer), tick(), member)
return {1, 1, #list, gauges()}
"""
)
"""ARGV: prefix, member, tenant, in bytes the budget, the common quota and the tenant's own or '', blob. Returns 1 or 0
for stored now and for there now, blobs evicted, bytes of all, blobs."""

"""Byte accounts per tenant on the remote server, kept by scripts there, each of which runs as one step.

Keys, all beginning with the tier's prefix; a member is what follows the prefix in a blob's key:

    of           hash: member -> "BYTES:TENANT"; "" -> bytes of all; "#" -> the clock, which counts uses
    use          sorted set: tenant -> bytes
    lru:TENANT   sorted set: member -> clock of its last use

Who gives way when room is needed: of the tenants that hold more than their quota (the writer with its new blob), the
one whose blob was used longest ago loses it. If none does, which several tenants at their quotas may bring about, the
largest loses its oldest. So a tenant keeps what it holds up to its quota, less one blob at most, whatever others write.

The server may lose any key by itself (FLUSHALL, its own eviction): what is missing from the account is written anew,
and what is in the account and missing is taken out when it is met.
"""

from __future__ import annotations

_COMMON = """
local p = ARGV[1]
local of, use = p .. 'of', p .. 'use'
local function tick() return redis.call('HINCRBY', of, '#', 1) end
local function owner(member)
  local was = redis.call('HGET', of, member)
  if not was then return nil, 0 end
  local colon = string.find(was, ':', 1, true)
  return string.sub(was, colon + 1), tonumber(string.sub(was, 1, colon - 1))
end
local function take(tenant, bytes)
  redis.call('HINCRBY', of, '', -bytes)
  if tonumber(redis.call('ZINCRBY', use, -bytes, tenant)) <= 0 then redis.call('ZREM', use, tenant) end
end
local function forget(member)
  local tenant, bytes = owner(member)
  redis.call('DEL', p .. member)
  if tenant then
    redis.call('HDEL', of, member)
    redis.call('ZREM', p .. 'lru:' .. tenant, member)
    take(tenant, bytes)
  end
end
"""

TOUCH = (
    _COMMON
    + """
local there = {}
for i = 2, #ARGV do
  local tenant = owner(ARGV[i])
  there[i - 1] = redis.call('TOUCH', p .. ARGV[i])
  if tenant and there[i - 1] == 1 then
    redis.call('ZADD', p .. 'lru:' .. tenant, tick(), ARGV[i])
  elseif tenant then
    forget(ARGV[i])
  end
end
return there
"""
)
"""ARGV: prefix, members. Returns 1 or 0 for each."""

DROP = _COMMON + "for i = 2, #ARGV do forget(ARGV[i]) end return #ARGV - 1"
"""ARGV: prefix, members."""

PUT = (
    _COMMON
    + """
local member, writer, blob = ARGV[2], ARGV[3], ARGV[6]
local budget, quota, size = tonumber(ARGV[4]), tonumber(ARGV[5]), #ARGV[6]
local evicted = 0
local function all() return math.max(0, tonumber(redis.call('HGET', of, '') or '0')) end
local function count() return math.max(0, redis.call('HLEN', of) - 2) end
local function oldest(tenant) return redis.call('ZRANGE', p .. 'lru:' .. tenant, 0, 0, 'WITHSCORES') end
local function victim()
  local over = redis.call('ZRANGEBYSCORE', use, '(' .. ARGV[5], '+inf')
  local mine = tonumber(redis.call('ZSCORE', use, writer) or '0')
  if mine > 0 and mine <= quota and mine + size > quota then over[#over + 1] = writer end
  if #over == 0 then over = redis.call('ZREVRANGE', use, 0, 0) end
  local found, least
  for _, tenant in ipairs(over) do
    local first = oldest(tenant)
    if not first[1] then
      take(tenant, tonumber(redis.call('ZSCORE', use, tenant)))
      return nil, true
    end
    if not least or tonumber(first[2]) < least then found, least = {tenant, first[1]}, tonumber(first[2]) end
  end
  return found, false
end
local tenant = owner(member)
if tenant and redis.call('EXISTS', p .. member) == 1 then
  redis.call('ZADD', p .. 'lru:' .. tenant, tick(), member)
  return {1, 0, all(), count()}
end
forget(member)
while size <= budget and all() + size > budget do
  local lost, again = victim()
  if lost then
    forget(lost[2])
    redis.call('ZREM', p .. 'lru:' .. lost[1], lost[2])
    evicted = evicted + 1
  elseif not again then
    redis.call('HSET', of, '', 0)
  end
end
if size > budget then return {0, evicted, all(), count()} end
redis.call('SET', p .. member, blob)
redis.call('HSET', of, member, size .. ':' .. writer)
redis.call('HINCRBY', of, '', size)
redis.call('ZINCRBY', use, size, writer)
redis.call('ZADD', p .. 'lru:' .. writer, tick(), member)
return {1, evicted, all(), count()}
"""
)
"""ARGV: prefix, member, tenant, budget and quota in bytes, blob. Returns stored (1 or 0), blobs evicted, bytes of all,
blobs."""

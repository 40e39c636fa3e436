// The places of numbers in Redis, as docs/layouts.md and docs/scripts.md have them.

// The first letter of a bucket's number.
const LETTERS = { packed: '', entity: 'h', string: 's' };

// Reads the bucket's field `_` and the number at one instant. With two commands, a flush of Redis between them would
// look like zero.
const READ_SCRIPT = `
local number
if ARGV[1] == '' then
    number = redis.pcall('GET', KEYS[2])
else
    number = redis.pcall('HGET', KEYS[2], ARGV[1])
end
return { redis.call('HGET', KEYS[1], '_'), type(number) == 'table' and '?' or number }
`;

// Computes the CRC-32 of zlib. Node has its own zlib.crc32 in 20.15, and from 22.2 on.
function crc32(text) {
  let crc = ~0;
  for (const byte of Buffer.from(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit += 1) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  return ~crc >>> 0;
}

// Returns the bucket's name, for instance video:3a2f.
export function bucketOf({ form, bucketBits }, kind, targetId) {
  const bucket = (1 << bucketBits) | (crc32(targetId) & ((1 << bucketBits) - 1));
  return `${kind}:${LETTERS[form]}${bucket.toString(16)}`;
}

// Reads the bucket's field `_`, and the number's field or key.
export function read(redis, card, keyPrefix, kind, metric, targetId) {
  const bucket = `${keyPrefix}c:{${bucketOf(card, kind, targetId)}}`;
  if (card.form === 'packed') return redis.hmGet(bucket, ['_', targetId]);
  const names = { '{kind}': kind, '{id}': targetId, '{metric}': metric };
  const key = card.counterKey.replace(/\{(kind|id|metric)\}/g, (name) => names[name]);
  return redis.eval(READ_SCRIPT, { keys: [bucket, keyPrefix + key], arguments: [card.form === 'entity' ? metric : ''] });
}

// Returns the number from the answer to `read`. `null` means that the number is unknown, not zero.
export function numberIn(card, kind, metric, [loaded, value]) {
  if (loaded === null || loaded.startsWith('~')) return null;
  const text = value || '0';
  const number = card.form === 'packed' ? (text.split(',')[card.metrics[metric] - 1] ?? '0') : text;
  if (!/^-?[0-9]+$/.test(number)) return null;
  // Late events can push a number below zero for a moment.
  return card.belowZero.includes(`${kind}:${metric}`) ? Number(number) : Math.max(Number(number), 0);
}

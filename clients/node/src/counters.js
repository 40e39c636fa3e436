// Counters in Redis: the layout `packed` of docs/scripts.md.

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
export function bucketOf({ bucketBits }, kind, targetId) {
  const bucket = (1 << bucketBits) | (crc32(targetId) & ((1 << bucketBits) - 1));
  return `${kind}:${bucket.toString(16)}`;
}

export const keyOf = ({ keyPrefix }, bucket) => `${keyPrefix}c:{${bucket}}`;

// Returns a target's number. `loaded` is the bucket's field `_`, and `value` is the field of the target's id. `null`
// means that the number is unknown, not zero.
export function numberIn(loaded, value, place) {
  if (loaded === null || loaded.startsWith('~')) return null;
  const numbers = value ? value.split(',') : [];
  if (numbers.length < place) return 0;
  return /^-?[0-9]+$/.test(numbers[place - 1]) ? Number(numbers[place - 1]) : null;
}

// Returns each target's number, and the names of the buckets that Redis has lost.
export function numbersIn(layout, kind, metric, targetIds, answers) {
  const numbers = answers.map(([loaded, value]) => numberIn(loaded, value, layout.metrics[metric]));
  const unloaded = targetIds.filter((_, place) => answers[place][0] === null);
  return { numbers, missing: [...new Set(unloaded.map((id) => bucketOf(layout, kind, id)))] };
}

// Computes the CRC-32 of zlib, PNG and Ethernet. Node has zlib.crc32 in 20.15 and later 20.x versions, and from 22.2
// on.
export function crc32(text) {
  let crc = ~0;
  for (const byte of Buffer.from(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit += 1) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  return ~crc >>> 0;
}

// A text inside a PNG file: an iTXt chunk before the last one.

const END = 12; // bytes of the last chunk, IEND
const encoder = new TextEncoder();

export function withText(png: Uint8Array, keyword: string, text: string): Uint8Array {
  const head = encoder.encode(`iTXt${keyword}\0\0\0\0\0`); // not compressed, no language, no translated keyword
  const body = encoder.encode(text);
  const chunk = new Uint8Array(4 + head.length + body.length + 4);
  const view = new DataView(chunk.buffer);
  view.setUint32(0, head.length - 4 + body.length);
  chunk.set(head, 4);
  chunk.set(body, 4 + head.length);
  view.setUint32(chunk.length - 4, checksum(chunk.subarray(4, chunk.length - 4)));
  const whole = new Uint8Array(png.length + chunk.length);
  whole.set(png.subarray(0, png.length - END));
  whole.set(chunk, png.length - END);
  whole.set(png.subarray(png.length - END), png.length - END + chunk.length);
  return whole;
}

// CRC-32 as PNG takes it.
function checksum(data: Uint8Array): number {
  let crc = 0xffffffff;
  for (const byte of data) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit += 1) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  return (crc ^ 0xffffffff) >>> 0;
}

// From text to columns of 32-bit integers: base64, deflate, bytes grouped by significance, differences (encode.py).

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function inflated(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function columnsOf(base64, count, columns) {
  const bytes = await inflated(base64);
  return Array.from({ length: columns }, (_, number) => columnOf(bytes, 4 * count * number, count));
}

function columnOf(bytes, offset, count) {
  const [a, b, c, d] = [0, 1, 2, 3].map((plane) => bytes.subarray(offset + plane * count, offset + (plane + 1) * count));
  const column = new Int32Array(count);
  for (let i = 0; i < count; i++) column[i] = a[i] | (b[i] << 8) | (c[i] << 16) | (d[i] << 24);
  return column;
}

function summed(column) {
  for (let i = 1; i < column.length; i++) column[i] += column[i - 1];
  return column;
}

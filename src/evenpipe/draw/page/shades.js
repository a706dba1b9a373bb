// Rows from far away: the mean colour of every pixel, whatever the number of passes in it. Sums of colour times duration over
// the events answer for any stretch of time with two look-ups.

class Shades {
  // colour(i): [red, green, blue] of an event, or null where it is hidden.
  constructor(panel, colour) {
    this.panel = panel;
    const sums = [0, 1, 2, 3].map(() => new Float64Array(panel.count + 1));
    for (let i = 0; i < panel.count; i++) {
      const rgb = colour(i), ticks = rgb ? panel.durations[i] : 0;
      for (let k = 0; k < 3; k++) sums[k][i + 1] = sums[k][i] + (rgb ? rgb[k] * ticks : 0);
      sums[3][i + 1] = sums[3][i] + ticks;
    }
    this.sums = sums;
  }

  // Write the colours of `width` pixels of a row, from `start` on with `step` per pixel (in time), as RGBA into
  // `pixels` from `offset` on. Between two events, and outside the timeline, `idle` and nothing.
  write(row, start, step, width, pixels, offset, idle) {
    const { panel } = this;
    const from = start / panel.step, per = step / panel.step;
    const length = panel.length / panel.step;
    const before = new Float64Array(4), after = new Float64Array(4);
    let i = this.sumsAt(row, from, panel.before(row, start), before);
    for (let x = 0; x < width; x++, offset += 4) {
      const tick = from + (x + 1) * per;
      i = this.sumsAt(row, tick, this.seek(row, i, tick), after);
      const inside = tick > 0 && tick - per < length;
      const rest = Math.max(0, per - (after[3] - before[3]));
      for (let k = 0; k < 3; k++) pixels[offset + k] = (after[k] - before[k] + rest * idle[k]) / per;
      pixels[offset + 3] = inside ? 255 : 0;
      before.set(after);
    }
  }

  // The last event that starts at `tick` or before, from `i` on: a few steps, then by halves.
  seek(row, i, tick) {
    const { ticks } = this.panel;
    for (let steps = 0; steps < 8; steps++) {
      if (i + 1 >= row.last || ticks[i + 1] > tick) return i;
      i++;
    }
    return i + 1 + lastAtMost(row.last - i - 1, (k) => ticks[i + 1 + k], tick);
  }

  // The sums over a row up to `tick`, where `i` is its last event that has started. Returns `i`.
  sumsAt(row, tick, i, result) {
    if (i < row.first) {
      for (let k = 0; k < 4; k++) result[k] = this.sums[k][row.first];
      return i;
    }
    const { ticks, durations } = this.panel;
    const share = durations[i] ? Math.min(1, (tick - ticks[i]) / durations[i]) : 1;
    for (let k = 0; k < 4; k++) result[k] = this.sums[k][i] + (this.sums[k][i + 1] - this.sums[k][i]) * share;
    return i;
  }
}

// Rows of pixels that are written together and then stretched to the height of their lanes.
class Strips {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
  }

  // entries: { shades, row, start, step, width, x, y, w, h }: what to write, in pixels of the device, and where to.
  draw(target, entries, idle) {
    if (!entries.length) return;
    const width = Math.max(...entries.map((entry) => entry.width));
    if (this.canvas.width < width || this.canvas.height < entries.length) {
      this.canvas.width = Math.max(width, this.canvas.width);
      this.canvas.height = Math.max(entries.length, this.canvas.height);
    }
    const image = new ImageData(width, entries.length);
    entries.forEach((entry, k) => {
      entry.shades.write(entry.row, entry.start, entry.step, entry.width, image.data, 4 * width * k, idle);
    });
    this.context.putImageData(image, 0, 0);
    target.imageSmoothingEnabled = false;
    entries.forEach(({ width: w, x, y, w: across, h }, k) => target.drawImage(this.canvas, 0, k, w, 1, x, y, across, h));
  }
}
